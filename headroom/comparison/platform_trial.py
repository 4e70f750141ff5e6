"""The numbers of a session of judgements: many candidates, one after another, against a base that
they share, as in a platform trial (Woodcock & LaVange 2017). It has the error budget of all of
them, and a state that survives a kill, as numbers for JSON.

However many candidates are tried, the probability that any of them is kept though it is no better
is at most the budget: each gets a level of its own, fixed by its number alone, and all levels add
up to the budget. That is Bonferroni's inequality (alpha-spending, Foster & Stine 2008; Tian &
Ramdas 2021), so it holds also as candidates depend on each other by the base that they share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from headroom.comparison.sequential_tests import (
    ALPHA,
    NO_NOISE,
    Goal,
    Judgement,
    Measurement,
    NextRun,
    PooledVariance,
    choose_next_run,
    judge,
    measure_base_noise,
    measure_candidate_noise,
)

HALF_SPENT_AFTER = 50  # candidates; the level falls slowly for as many as a night has


@dataclass(frozen=True)
class ErrorBudget:
    """The probability of a false keep that a session has, alpha, and how many candidates have got
    a level of it; after half_spent_after of them half is spent."""

    alpha: float = ALPHA
    half_spent_after: int = HALF_SPENT_AFTER
    candidates: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha: {self.alpha} is no probability; it lies between 0 and 1")
        if self.half_spent_after < 1 or self.candidates < 0:
            raise ValueError("half_spent_after: at least 1; candidates: at least 0")

    @property
    def spent(self) -> float:
        """Return the sum of all levels so far, which is below alpha for any number of them."""
        return self.alpha * self.candidates / (self.candidates + self.half_spent_after)

    @property
    def level(self) -> float:
        """Return the level of the latest candidate: what it adds to the sum, alpha * c / ((k + c -
        1)(k + c)) for number k and c = half_spent_after.

        Raises ValueError before the first candidate.
        """
        if not self.candidates:
            raise ValueError("no candidate has a level yet; allot one first")
        beyond = self.candidates + self.half_spent_after
        return self.alpha * self.half_spent_after / ((beyond - 1) * beyond)

    def allot(self) -> ErrorBudget:
        """Return the budget after one more candidate has got its level."""
        return replace(self, candidates=self.candidates + 1)


@dataclass(frozen=True)
class PlatformTrial:
    """The runs of the base and of the candidate that is open, None where none is; the budget, and
    what groups that have ended have shown of the noise.

    information: of the last look at the candidate. since_base: runs of candidates since the
    base's last one.
    """

    goal: Goal
    base: tuple[Measurement, ...] = ()
    candidate: tuple[Measurement, ...] | None = None
    budget: ErrorBudget = field(default_factory=ErrorBudget)
    noise: PooledVariance = NO_NOISE
    information: float = 0.0
    since_base: int = 0

    def open_candidate(self) -> PlatformTrial:
        """Return the session with a new candidate, which gets its level of the budget.

        Raises ValueError where another is open.
        """
        if self.candidate is not None:
            raise ValueError("a candidate is open; record its judgement first, or withdraw it")
        return replace(self, candidate=(), budget=self.budget.allot(), information=0.0)

    def add_run(self, run: Measurement, of: Literal["base", "candidate"]) -> PlatformTrial:
        """Return the session with one more run, the latest of all.

        Raises ValueError for a run of the base that is not finite, and for one of a candidate
        where none is open.
        """
        if of == "base":
            if not math.isfinite(run.value):
                raise ValueError(f"a run of the base came to {run.value}; it needs finite figures")
            return replace(self, base=(*self.base, run), since_base=0)
        if self.candidate is None:
            raise ValueError("no candidate is open; open one first")
        runs = (*self.candidate, run)
        return replace(self, candidate=runs, since_base=self.since_base + 1)

    def choose_next_run(self) -> NextRun:
        """Return whose run comes next; in an interleaved design the base's after two others."""
        if self.goal.design == "interleaved" and self.since_base > 1:
            return NextRun("base")
        return choose_next_run(self.base, self.candidate or (), goal=self.goal)

    def judge(self) -> Judgement:
        """Return what the open candidate has shown so far; see sequential_tests.judge."""
        return judge(
            self.base,
            self.candidate or (),
            goal=self.goal,
            level=self.budget.level,
            earlier=self.noise,
            information=self.information,
        )

    def record(self, judgement: Judgement) -> PlatformTrial:
        """Return the session after a look: a candidate that is kept becomes the base with its runs,
        one that is discarded or refused is closed."""
        if judgement.verdict == "undecided":
            return replace(self, information=judgement.information)
        return self._replace_base() if judgement.verdict == "keep" else self.withdraw_candidate()

    def withdraw_candidate(self) -> PlatformTrial:
        """Return the session without the candidate, also where it is undecided; its level stays
        spent, and its runs have shown of the noise what they have."""
        of_it = measure_candidate_noise(self.base, self.candidate or (), goal=self.goal)
        return replace(self, candidate=None, noise=self.noise + of_it, information=0.0)

    def _replace_base(self) -> PlatformTrial:
        noise = self.noise + measure_base_noise(self.base, goal=self.goal)
        if self.goal.design == "paired":
            return replace(self.withdraw_candidate(), base=self.candidate or ())
        base = self.candidate or ()
        return replace(self, base=base, candidate=None, noise=noise, information=0.0, since_base=0)

    def as_dict(self) -> dict[str, Any]:
        """Return the state as numbers and words that JSON knows; what is not finite as a word."""
        state = asdict(self)
        for run in (*state["base"], *(state["candidate"] or ())):
            run["value"] = run["value"] if math.isfinite(run["value"]) else str(run["value"])
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PlatformTrial:
        """Return the session of such a state. Raises TypeError and KeyError for another."""
        runs = state["candidate"]
        return cls(
            Goal(**state["goal"]),
            _read_runs(state["base"]),
            None if runs is None else _read_runs(runs),
            ErrorBudget(**state["budget"]),
            PooledVariance(**state["noise"]),
            state["information"],
            state["since_base"],
        )


def _read_runs(runs: list[dict[str, Any]]) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(float(run["value"]), run["seed"], float(run["time_s"])) for run in runs
    )
