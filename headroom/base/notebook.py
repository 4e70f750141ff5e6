"""The notebook that this program runs in, where it does: what is shown in its cells, which cell
runs now, and how that ends. IPython is asked where a notebook has imported it; nothing imports it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any
from uuid import uuid4


@dataclass(frozen=True)
class Cell:
    """A cell that is run: the same `key` each time, a `turn` of its own."""

    key: str
    turn: int


def find_shell() -> Any:
    """Return IPython's shell where it runs cells for a page in a browser or an editor; None on a
    terminal, in a script, and in a process that was forked from a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    kernel = getattr(shell, "kernel", None)
    is_here = getattr(getattr(kernel, "session", None), "pid", None) == os.getpid()
    return shell if is_here else None


def find_cell() -> Cell | None:
    """Return the cell that runs now; None elsewhere, and in a thread, which outlives its cell."""
    shell = find_shell()
    if shell is None or threading.current_thread() is not threading.main_thread():
        return None
    asked = shell.kernel.get_parent()
    # By its name, which most editors tell, or else by what stands in it.
    name = asked.get("metadata", {}).get("cellId") or asked.get("content", {}).get("code", "")
    return Cell(str(name), int(shell.execution_count))


def find_file() -> str:
    """Return the notebook's file; empty where no editor tells it."""
    shell = find_shell()
    if shell is None:
        return ""
    told = shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", "")
    return os.path.abspath(told) if told else ""


def follow_cell(hear_error: Callable[[BaseException], None]) -> Callable[[], None]:
    """Call `hear_error` with the error that the cell which runs now is left by, if any; return what
    ends that."""
    shell = find_shell()
    if shell is None or threading.current_thread() is not threading.main_thread():
        return lambda: None

    def leave() -> None:
        if hear in shell.events.callbacks["post_run_cell"]:
            shell.events.unregister("post_run_cell", hear)

    def hear(result: Any) -> None:
        leave()
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            hear_error(error)

    shell.events.register("post_run_cell", hear)
    return leave


def show(html: str, text: str) -> None:
    """Show this below the cell that runs now: the HTML, or the text where that cannot be shown."""
    find_shell().display_pub.publish({"text/html": html, "text/plain": text})


def make_line() -> Line | None:
    """Return a line below the cell that runs now; None where this is no notebook."""
    shell = find_shell()
    return None if shell is None else Line(shell)


class Line:
    """A line below a cell, which is written anew."""

    def __init__(self, shell: Any) -> None:
        self._shell, self._id, self._is_there = shell, uuid4().hex, False

    def write(self, text: str) -> None:
        """Show this text in place of the one before."""
        html = f'<pre style="margin:0;background:none;color:inherit">{escape(text)}</pre>'
        self._shell.display_pub.publish(
            {"text/html": html, "text/plain": text},
            transient={"display_id": self._id},
            update=self._is_there,
        )
        self._is_there = True


def show_answer(answer: dict[str, Any], make_html: Callable[[], str]) -> dict[str, Any]:
    """Return the answer to a program, which the cell that runs now has shown. In a notebook it
    shows itself as HTML, in other cells than this one."""
    return answer if find_shell() is None else _ShownAnswer(answer, make_html())


class _ShownAnswer(dict[str, Any]):
    def __init__(self, answer: dict[str, Any], html: str) -> None:
        super().__init__(answer)
        self._html, self._shown_by = html, find_cell()

    def __reduce__(self) -> Any:  # a copy is that of the answer
        return dict, (dict(self),)

    def _repr_html_(self) -> str:
        is_here = self._shown_by is not None and self._shown_by == find_cell()
        return "<i>as shown above</i>" if is_here else self._html
