"""Stacks of threads that are made up."""

from headroom.watch.stack_samples import Place


def make_place(file: str, line: int, function: str) -> Place:
    """A line that a thread stands at."""
    return Place(file, line, function)
