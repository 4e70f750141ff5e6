"""Whether the tests notice a wrong engine: `make mutants` turns a comparison, an operator, a number
or a condition, one at a time, and runs the tests of that file until one fails. It fails where fewer
than nine in ten mutants are killed. The sources on disk are left alone: each mutant is a process of
its own, forked with PyTorch already imported and none of this project, and only it sees the change.

Mutants that give what the original gives are named in tests/equivalent_mutants.txt, with a reason.
"""

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).parent.parent
# What is turned, and the tests that should notice.
SUBJECTS = {
    "headroom/data/targets.py": ["data/test_split.py"],
    "headroom/data/row_parts.py": ["data/test_row_parts.py"],
    "headroom/base/scores.py": ["base/test_scores.py"],
    "headroom/data/encoding.py": ["data/test_encoding.py"],
    "headroom/training/optim.py": ["training/test_optim.py"],
    "headroom/training/evaluation.py": ["training/test_evaluation.py", "training/test_loop.py"],
    "headroom/training/micro_batches.py": [
        "training/test_micro_batches.py",
        "training/test_loop.py",
    ],
    "headroom/training/optimizer_step.py": [
        "training/test_loop.py",
        "training/test_micro_batches.py",
    ],
    "headroom/training/loop.py": ["training/test_loop.py", "training/test_loop_stops.py"],
    "headroom/training/admission.py": ["training/test_admission.py"],
    "headroom/training/forecast.py": ["training/test_forecast.py"],
    "headroom/training/plan_forecast.py": ["training/test_forecast.py"],
    "headroom/watch/leaks.py": ["watch/test_leaks.py"],
}
EQUIVALENTS = ROOT / "tests" / "equivalent_mutants.txt"
LEAST_KILLED = 0.9
ELSEWHERE_S = 0.5  # a test of more seconds in processes of its own, which do not see the change
MOST_BYTES = 16 << 30  # of addresses, for a mutant that asks for all of the memory
OURS = ("headroom", "tasks", "flows", "tests", "benchmarks", "__m")
# They read their homes when they are imported, and tests/conftest.py gives them others.
NOT_AHEAD = (*OURS, "prefect", "mlflow")
TURNS = [
    *(f"ReplaceComparisonOperator_{turn}" for turn in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")),
    *(f"ReplaceComparisonOperator_{turn}" for turn in ("Eq_NotEq", "NotEq_Eq")),
    *(f"ReplaceComparisonOperator_{turn}" for turn in ("Is_IsNot", "IsNot_Is")),
    *(f"ReplaceBinaryOperator_{turn}" for turn in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul")),
    *(f"ReplaceBinaryOperator_{turn}" for turn in ("FloorDiv_Mul", "Mod_Mul", "Pow_Mul")),
    *(f"ReplaceBinaryOperator_{turn}" for turn in ("BitOr_BitAnd", "BitAnd_BitOr")),
    *(f"ReplaceBinaryOperator_{turn}" for turn in ("BitXor_BitOr", "LShift_RShift")),
    *(f"ReplaceUnaryOperator_{turn}" for turn in ("USub_UAdd", "Delete_Not", "Delete_Invert")),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("AddNot", "NumberReplacer"),
]


class Augmented(Operator):
    """Turns +=, -=, *= and /=, which cosmic-ray has no operator for."""

    turned = {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*="}

    def mutation_positions(self, node):
        if node.type == "operator" and node.value in self.turned:
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        node.value = self.turned[node.value]
        return node

    @classmethod
    def examples(cls):
        return ()


def mutants(source: str) -> dict[str, str]:
    """The mutated sources, by the line that is new in them."""
    known, found = {_meaning(source)}, {}
    lines = source.splitlines()
    for turn in [Augmented(), *(get_operator(f"core/{name}")() for name in TURNS)]:
        occurrence = 0
        while (mutated := mutate_code(source, turn, occurrence)) is not None:
            occurrence += 1
            if (meaning := _meaning(mutated)) in known:
                continue
            known.add(meaning)
            pairs = enumerate(zip(lines, mutated.splitlines(), strict=True))
            at, line = next((at, new) for at, (old, new) in pairs if old != new)
            name = re.sub(r"(?<=[([]) |(?<=\w=) (?=\w)", "", " ".join(line.split("  #")[0].split()))
            twins = sum(other.split(" (line")[0] == name for other in found)
            found[name if not twins else f"{name} (line {at + 1})"] = mutated
    return found


def _meaning(source: str) -> str:
    """The source without what mypy reads, and without strict=, which only asserts."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if hasattr(node, name):
                setattr(node, name, None)
        if isinstance(node, ast.ClassDef):
            node.decorator_list = []  # frozen
        elif isinstance(node, ast.Call):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        elif isinstance(node, ast.arguments):  # the star of those that go by name
            node.defaults += [default for default in node.kw_defaults if default]
            node.args = node.posonlyargs = node.kwonlyargs = node.kw_defaults = []
    return ast.dump(tree)


class _Mutated(importlib.machinery.SourceFileLoader):
    """Finds one module, and loads another source for it."""

    def __init__(self, file: str, source: str) -> None:
        super().__init__(file.removesuffix(".py").replace("/", "."), str(ROOT / file))
        self._source = source

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_code(self, fullname):
        return compile(self._source, self.path, "exec")


def _elsewhere_s() -> float:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


class _Seen:
    """In the process of a mutant: puts first what killed others, and keeps which test fails."""

    def __init__(self, first: tuple[str, ...], without: frozenset[str]) -> None:
        self.first, self.without = first, without
        self.failed: list[str] = []
        self.seconds = 0.0
        self.elsewhere: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.without]
        rank = {nodeid: at for at, nodeid in enumerate(self.first)}
        items.sort(key=lambda item: rank.get(item.nodeid, len(rank)))

    def pytest_runtest_logstart(self) -> None:
        self._before_s = _elsewhere_s()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if _elsewhere_s() - self._before_s > ELSEWHERE_S:
            self.elsewhere.add(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed:
            self.failed.append(report.nodeid)


@dataclass(frozen=True)
class Told:
    """By a process, before it ends."""

    code: int
    failed: list[str]
    seconds: float
    elsewhere: set[str]
    modules: list[str]


def _tested(
    file: str, source: str, first: tuple[str, ...], without: frozenset[str], told: Connection
) -> None:
    os.setsid()  # what it starts ends with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.meta_path.insert(0, _Mutated(file, source))
    seen = _Seen(first, without)
    tests = [f"tests/{name}" for name in SUBJECTS[file]]
    # Plugins are here already: that is what a fork is for.
    options = ["-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*options, *tests], plugins=[seen])
    modules = [name for name in sys.modules if not name.startswith(NOT_AHEAD)]
    told.send(Told(int(code), seen.failed, seen.seconds, seen.elsewhere, modules))


def _run(
    file: str,
    source: str,
    *,
    first: tuple[str, ...] = (),
    without: frozenset[str] = frozenset(),
    limit_s: float,
) -> Told | None:
    """What the process tells; None where it had to be ended, or died of itself."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_tested, args=(file, source, first, without, theirs)
    )
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(limit_s) else None
    except EOFError:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def equivalents() -> dict[str, list[str]]:
    """By file, the mutants that are named as equivalent; `...` at the end stands for any end."""
    named: dict[str, list[str]] = {}
    for line in EQUIVALENTS.read_text().splitlines():
        if line in SUBJECTS:
            here = named.setdefault(line, [])
        elif line.strip() and not line.lstrip().startswith("#"):
            here.append(line.strip())
    return named


def judged(file: str, named: list[str]) -> bool:
    """Whether enough mutants of the file are killed; prints those that are not."""
    source = (ROOT / file).read_text()
    cold = _run(file, source, limit_s=600)
    assert cold is not None and cold.code == 0, f"{file}: its tests fail without a mutant: {cold}"
    for name in cold.modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    without = frozenset(cold.elsewhere)
    warm = _run(file, source, without=without, limit_s=600)
    assert warm is not None and warm.code == 0, f"{file}: its tests fail in a fork: {warm}"
    limit_s = 10 + 5 * warm.seconds
    kills: Counter[str] = Counter()
    used: set[str] = set()
    found, survived, equivalent = mutants(source), 0, 0
    for name, mutated in found.items():
        first = tuple(test for test, _ in kills.most_common())
        told = _run(file, mutated, first=first, without=without, limit_s=limit_s)
        if told is None:
            print(f"    killed without an answer: {name}", flush=True)  # by time, or by a signal
            continue
        if told.code != 0:
            kills.update(told.failed)
            continue
        reasons = {n for n in named if name == n or n.endswith("...") and name.startswith(n[:-3])}
        used |= reasons
        equivalent += bool(reasons)
        survived += not reasons
        if not reasons:
            print(f"    survived: {name}", flush=True)
    for name in set(named) - used:
        print(f"    named as equivalent, and no survivor: {name}")
    killed = len(found) - survived - equivalent
    share = killed / max(1, killed + survived)
    print(
        f"{file}: {len(found)} mutants, {killed} killed, {survived} survived, {equivalent} "
        f"equivalent: {share:.0%}",
        flush=True,
    )
    return share >= LEAST_KILLED and used == set(named)


if __name__ == "__main__":
    files = sys.argv[1:] or list(SUBJECTS)
    if strangers := set(files) - set(SUBJECTS):
        sys.exit(f"{', '.join(strangers)}: not among {', '.join(SUBJECTS)}")
    os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch comes
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the process of a mutant
    began, named = time.monotonic(), equivalents()
    with tempfile.TemporaryDirectory(prefix="headroom-mutants-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        good = [judged(file, named.get(file, [])) for file in files]
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(not all(good))
