"""Memory as a test, for pytest: a marker with limits and a fixture that forecasts a training step,
without a GPU, and holds it against these and against the snapshot beside the tests.

    @pytest.mark.memory(on="T4", at_most="12 GiB")
    def test_a_step_fits(memory):
        memory(make_model(), torch.zeros(64, 512), optimizer="adamw")

pytest loads it wherever Headroom is installed: it imports PyTorch only where a test asks for the
fixture, and leaves markers and fixtures of the same names alone that are somebody else's.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headroom.base.units import format_mebibytes, make_printable, parse_mebibytes
from headroom.training.memory_snapshot import (
    MIB,
    NAME,
    SnapshotError,
    StepSnapshot,
    describe_growth,
    describe_shrinking,
    list_shapes,
    make_table,
    merge_snapshots,
    parse_percent,
    read_snapshots,
    write_snapshots,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from headroom.training.forecast import Forecast

OPTION = "--memory-update"
WITHIN = 0.01  # of the snapshot: what a step takes is counted, and so the same each time
COLLECTED = "headroom_collected"  # what a worker of pytest-xdist tells at its end
_SETTINGS = ("on", "at_most", "within")


@dataclass(frozen=True)
class Limits:
    """What the markers of a test ask for."""

    sizes_mib: Mapping[str, float]  # of the GPUs that a step has to fit
    at_most_mib: float | None = None
    within: float = WITHIN


_PROBLEM = pytest.StashKey[str]()
_STEP = pytest.StashKey["StepCheck"]()
_TESTS = pytest.StashKey[dict[str, list[str]]]()  # the names in a file of tests, by its path


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes snapshots."""
    parser.getgroup("headroom").addoption(
        OPTION,
        action="store_true",
        help=f"write {NAME} anew, from what the steps of the tests take now",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, also where markers are strict."""
    config.addinivalue_line(
        "markers",
        'memory(on="T4", at_most="12 GiB", within="1 %"): limits of what the step takes that the '
        "test gives to the fixture `memory`: GPUs that it fits, its peak, and how much more than "
        "its snapshot it may take",
    )
    config.stash[_TESTS] = {}
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist tells its reports to another
        config.pluginmanager.register(SnapshotWriter(config), "headroom-snapshots")


@pytest.hookimpl(tryfirst=True)  # before tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse markers that nobody could keep to, all at once."""
    problems = []
    for item in items:
        try:
            _read_marker_of(item)
        except ValueError as error:
            problems.append(f"{item.nodeid}: {error}")
            item.stash[_PROBLEM] = str(error)
    # A worker of pytest-xdist that refuses its tests dies, and its session with an internal error:
    # there each of these tests fails.
    if problems and not hasattr(config, "workerinput"):
        raise pytest.UsageError("\n".join(problems))
    # A test that was asked for by its name has not all others of its file beside it.
    if config.getoption(OPTION, False) and not _is_partial(config):
        tests = config.stash[_TESTS]
        for item in items:
            tests.setdefault(str(item.path), []).append(_name_test(item))
        if hasattr(config, "workeroutput"):
            config.workeroutput[COLLECTED] = tests


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test whose marker nobody could keep to."""
    if problem := item.stash.get(_PROBLEM, ""):
        pytest.fail(problem, pytrace=False)


def _is_partial(config: pytest.Config) -> bool:
    has_failed_only = config.getoption("lf", False) or config.getoption("stepwise", False)
    return bool(has_failed_only) or any("::" in word for word in config.args)


def _name_test(item: pytest.Item) -> str:
    """Return the name of a test in the file of snapshots beside it."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def _is_ours(item: pytest.Item) -> bool:
    """Return whether the fixture `memory` of this test is the one below: a project may have its
    own."""
    by_name = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    found = by_name.get("memory", ())
    return bool(found) and found[-1].func.__module__ == __name__


def _read_marker_of(item: pytest.Item) -> Limits | None:
    """Return the limits of a test; None where it is not one of ours. Raises ValueError."""
    asked: dict[str, Any] = {}
    words: list[Any] = []
    for marker in item.iter_markers("memory"):  # that of the test itself first, then the class's
        words += marker.args
        asked = {**marker.kwargs, **asked}
    if _is_ours(item):
        return _read_limits(asked, words)
    if set(asked) & set(_SETTINGS) and "memory" not in getattr(item, "fixturenames", ()):
        raise ValueError(
            "the marker memory limits what the test gives to the fixture `memory`, which it has "
            "not: def test_it(memory): memory(model, batch)"
        )
    return None


def _read_limits(asked: Mapping[str, Any], words: Sequence[Any]) -> Limits:
    """Return what a marker asks for. Raises ValueError."""
    if words or set(asked) - set(_SETTINGS):
        strange = ", ".join(map(repr, (*words, *sorted(set(asked) - set(_SETTINGS)))))
        raise ValueError(f"the marker memory has on=, at_most= and within= (got {strange})")
    sizes: dict[str, float] = {}
    if (on := asked.get("on")) is not None:
        if not isinstance(on, (str, list, tuple)) or not on or not all(map(_is_text, on)):
            raise ValueError(f"on: is a GPU, or a list of them (got {on!r})")
        from headroom.training.loop_forecast import parse_gpus

        sizes = parse_gpus(on)
    limits = Limits(sizes)
    if "at_most" in asked:
        example = 'a size such as "12 GiB" or "900 MiB"'
        limits = replace(limits, at_most_mib=_read(asked, "at_most", parse_mebibytes, example))
    if "within" in asked:
        example = 'a percentage such as "2 %"'
        limits = replace(limits, within=_read(asked, "within", parse_percent, example))
    return limits


def _read(
    asked: Mapping[str, Any], name: str, parse: Callable[[str], float | None], what: str
) -> float:
    value = asked[name]
    number = parse(value) if isinstance(value, str) else None
    if number is None:
        raise ValueError(f"{name}: is {what} (got {make_printable(repr(value), limit=60)})")
    return number


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


class StepCheck:
    """The fixture `memory` of a test: it is called with what a step is made of."""

    def __init__(self, item: pytest.Item, limits: Limits) -> None:
        self.file = item.path.parent / NAME
        self.name = _name_test(item)
        self.taken: StepSnapshot | None = None  # of a step that is within its limits
        self.shrunk = ""
        self.is_used = False
        self._limits = limits
        self._is_update = item.config.getoption(OPTION, False)
        file = os.path.relpath(item.path, item.config.invocation_params.dir)
        nodeid = f"{file}::{item.nodeid.partition('::')[2]}"
        self._command = f"pytest {OPTION} {shlex.quote(nodeid)}"

    def __call__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        batch: Any,
        *,
        optimizer: str | type[Optimizer] | Optimizer = "adamw",
        loss: Callable[[Any], Tensor] | None = None,
        autocast: torch.dtype | None = None,
    ) -> Forecast:
        """Forecast a training step and fail the test where it takes more than the marker or the
        snapshot allow. The arguments are those of `headroom.forecast`, and the answer is that of
        `headroom.peak`, counted as on a machine without a GPU, so that it is the same on all."""
        __tracebackhide__ = True
        if self.is_used:
            pytest.fail("memory: is called once in a test; for several steps parametrize it")
        self.is_used = True
        # Here, since PyTorch is slow to import.
        import torch

        from headroom.base import nested
        from headroom.training import gpu_fit, loop_forecast

        try:
            kept = read_snapshots(self.file)
            step = loop_forecast.make_step(
                model, batch, optimizer=optimizer, loss=loss, autocast=autocast
            )
            with (
                warnings.catch_warnings()
            ):  # of a step that nobody takes, also where they are errors
                warnings.simplefilter("ignore")
                gpu = gpu_fit.make_absent_gpu(0)
                forecast, assumed = loop_forecast.forecast_step(step, gpu, is_portable=True)
        except ValueError as error:  # ConfigError, SnapshotError, UnforeseeableMemory
            raise pytest.fail.Exception(f"memory: {error}", pytrace=False) from None
        now = StepSnapshot(
            peak_bytes=forecast.peak_bytes,
            phase=forecast.phase,
            owners=dict(forecast.owners),
            phases=dict(forecast.phases),
            layers={name: sum(owners.values()) for name, owners in forecast.layers.items()},
            batch=list_shapes(nested.find_named_tensors(batch, "batch")),
            torch=torch.__version__.partition("+")[0],
        )
        before = kept.get(self.name)
        problems = gpu_fit.find_misfits(forecast.needed_bytes, self._limits.sizes_mib)
        problems += self._find_excess(now)
        change = self._compare(before, now)
        if problems or change:
            # Where a limit is passed, nothing is written.
            remedy = "" if problems else f"to keep what a step takes now: {self._command}"
            notes = (f"assumed: {assumed}" if assumed else "", forecast.note, remedy)
            lines = (*problems, change, "\n" + make_table(before, now), *notes)
            pytest.fail("memory: " + "\n".join(filter(None, lines)), pytrace=False)
        self.taken = now
        return forecast

    def _find_excess(self, now: StepSnapshot) -> list[str]:
        """Return the sentence that the peak is higher than the marker allows, if it is."""
        most_mib, peak_mib = self._limits.at_most_mib, now.peak_bytes / MIB
        if most_mib is None or peak_mib <= most_mib:
            return []
        return [
            f"a step takes {format_mebibytes(peak_mib)} at its peak, which may be at most "
            f"{format_mebibytes(most_mib)}"
        ]

    def _compare(self, before: StepSnapshot | None, now: StepSnapshot) -> str:
        """Return what is wrong by the snapshot; empty where nothing is, or it is written anew."""
        if self._is_update:
            return ""
        if before is None:
            return f"{NAME} has no snapshot of this test"
        if shrinking := describe_shrinking(before, now, within=self._limits.within):
            self.shrunk = f"{shrinking}; {self._command}"
        return describe_growth(before, now, within=self._limits.within)


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> StepCheck:
    """Call it with a model, a batch and an optimizer: memory(model, batch, optimizer="adamw"). The
    test fails where a training step takes more than its marker `memory` and its snapshot allow."""
    limits = _read_marker_of(request.node)
    assert limits is not None
    check = StepCheck(request.node, limits)
    request.node.stash[_STEP] = check
    return check


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    """Fail a test that has measured nothing, and give what it has to its report, which the process
    gets that writes."""
    outcome = yield
    check = item.stash.get(_STEP, None)
    if check is None or call.when != "call":
        return
    report = outcome.get_result()
    if report.outcome != "passed":
        return
    if not check.is_used:
        report.outcome = "failed"
        report.longrepr = "memory: the test has not called it: memory(model, batch)"
    elif check.taken is not None:
        told = {"file": str(check.file), "name": check.name, "shrunk": check.shrunk}
        report.headroom_memory = {**told, "taken": vars(check.taken)}


class SnapshotWriter:
    """Hears of all steps of a session, those of its workers too, and writes their snapshots."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._taken: dict[Path, dict[str, StepSnapshot]] = {}
        self._lines: list[str] = []  # of the summary

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a test has taken."""
        told = getattr(report, "headroom_memory", None)
        if told is None:
            return
        self._taken.setdefault(Path(told["file"]), {})[told["name"]] = StepSnapshot(**told["taken"])
        if told["shrunk"]:
            self._lines.append(f"{told['name']}: {told['shrunk']}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Keep which tests a worker of pytest-xdist has found: each finds the same."""
        output = getattr(node, "workeroutput", None) or {}
        self._config.stash[_TESTS].update(output.get(COLLECTED, {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the snapshots, where that was asked for."""
        if not self._config.getoption(OPTION, False):
            return
        tests = {Path(file): names for file, names in self._config.stash[_TESTS].items()}
        beside = {file.parent / NAME for file in tests}
        for file in sorted({*self._taken, *filter(Path.exists, beside)}):
            near = {
                one.name: set(names) for one, names in tests.items() if one.parent == file.parent
            }
            try:
                self._write(file, near)
            except (OSError, SnapshotError) as error:
                self._lines.append(f"not written: {error}")
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _write(self, file: Path, near: Mapping[str, set[str]]) -> None:
        kept = read_snapshots(file)
        merged = merge_snapshots(kept, self._taken.get(file, {}), near)
        if merged == kept:
            return
        write_snapshots(file, merged)
        new = sum(kept.get(name) != one for name, one in merged.items())
        gone = len(set(kept) - set(merged))
        shown = os.path.relpath(file, self._config.invocation_params.dir)
        self._lines.append(f"{shown}: {new} written" + (f", {gone} removed" if gone else ""))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Tell what was written, and which snapshots are larger than their steps."""
        if self._lines:
            terminalreporter.section("memory snapshots")
            for line in self._lines:
                terminalreporter.write_line(line)
