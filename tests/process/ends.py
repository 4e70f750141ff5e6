"""How a process ends that a test has forked."""

from headroom.process import signals


def end_by_signals() -> None:
    """Let a signal end this process as it ends a command's: by an exception, with its exit code."""
    signals.install_signal_handlers()
    signals.enable_signal_exceptions()
