"""What a user's code ends is an error of the training, where an account follows the program too."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from headroom.run.program_end import ProgramEnd
from tests.training.test_own_training import ENDING, _trained

Own = Callable[[str, str], None]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("exit", "it exits with 0"),
        ("odd", "Odd: enough"),
        ("generator", "GeneratorExit: enough"),
        ("interrupt", "KeyboardInterrupt: enough"),
        ("text", r"\\ud800"),
    ],
)
def test_an_end_that_a_users_code_asks_for_is_an_error_with_its_words(
    own: Own,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kind: str,
    words: str,
) -> None:
    """`sys.exit(0)` in a loss ended the run with nothing trained and exit code 0; so it did where
    an account in the same program follows its end."""
    before = signal.signal(signal.SIGINT, lambda *_: None)  # as ours
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    end = ProgramEnd(lambda error: None)
    request.addfinalizer(end.close)
    place = r"mine.py:\d+: " if kind != "text" else ""
    with pytest.raises((RuntimeError, ValueError), match=place + words):
        _trained(
            own,
            tmp_path,
            model="mine:Ending",
            source="mine:pairs",
            args={"kind": kind},
            more=ENDING,
        )
    with pytest.raises((RuntimeError, ValueError), match=place + words):
        _trained(
            own,
            tmp_path,
            model="mine:Net",
            source="mine:rows",
            data={"args": {"kind": kind}},
            more=ENDING,
        )
    with pytest.raises(ValueError, match="^data.source: mine:none raised: mine.py:.*" + words):
        _trained(
            own,
            tmp_path,
            model="mine:Net",
            source="mine:none",
            data={"args": {"kind": kind}},
            more=ENDING,
        )
