"""The error budget of a session, what it makes of judgements, and how it survives a kill."""

import json
import math
from random import Random

import pytest

from headroom.comparison.platform_trial import ErrorBudget, PlatformTrial
from headroom.comparison.sequential_tests import Goal, Judgement, Measurement, NextRun

LOSS = Goal()


def make_session(*values: float, goal: Goal = LOSS) -> PlatformTrial:
    session = PlatformTrial(goal)
    for at, value in enumerate(values):
        session = session.add_run(Measurement(value, at, float(at)), "base")
    return session


def try_values(session: PlatformTrial, *values: float) -> PlatformTrial:
    for at, value in enumerate(values, 10):
        session = session.add_run(Measurement(value, at, float(at)), "candidate")
    return session


def test_levels_add_up_to_what_is_spent_and_never_to_the_budget() -> None:
    budget, total = ErrorBudget(), 0.0
    levels = []
    for _ in range(20_000):
        budget = budget.allot()
        levels.append(budget.level)
        total += budget.level
    assert total == pytest.approx(budget.spent) and budget.spent < budget.alpha
    assert budget.spent > 0.99 * budget.alpha
    assert levels == sorted(levels, reverse=True)
    assert ErrorBudget(candidates=50).spent == pytest.approx(0.025)


def test_a_budget_that_is_none_is_refused() -> None:
    for alpha in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="alpha: .* is no probability"):
            ErrorBudget(alpha)
    with pytest.raises(ValueError, match="half_spent_after: at least 1"):
        ErrorBudget(half_spent_after=0)
    with pytest.raises(ValueError, match="no candidate has a level yet"):
        ErrorBudget().level  # noqa: B018


def test_a_kept_candidate_becomes_the_base_with_its_runs() -> None:
    session = try_values(make_session(1.0, 1.1, 0.9, 1.0).open_candidate(), 0.5, 0.6)
    kept = session.record(Judgement("keep", ""))
    assert [run.value for run in kept.base] == [0.5, 0.6] and kept.candidate is None
    assert kept.noise.sum_squares == pytest.approx(0.02) and kept.noise.freedom == 3
    assert kept.choose_next_run() == NextRun("base"), "two runs are few for a base"


@pytest.mark.parametrize("verdict", ["discard", "refused"])
def test_a_candidate_that_is_not_kept_leaves_its_noise_alone(verdict: str) -> None:
    session = try_values(make_session(1.0, 1.1, 0.9, 1.0).open_candidate(), 1.5, 1.7)
    closed = session.record(Judgement(verdict, ""))  # type: ignore[arg-type]
    assert closed.candidate is None and closed.base == session.base
    assert closed.noise.sum_squares == pytest.approx(0.02) and closed.noise.freedom == 1
    assert closed.budget == session.budget, "a level is spent once"


def test_an_undecided_candidate_stays_open_and_its_look_counts() -> None:
    session = try_values(make_session(1.0, 1.1, 0.9, 1.0).open_candidate(), 0.8)
    judgement = session.judge()
    after = session.record(judgement)
    assert judgement.verdict == "undecided" and after.candidate == session.candidate
    assert after.information == judgement.information > 0


def test_a_second_look_at_the_same_runs_gives_nothing_away() -> None:
    """The line is nearer by what a step goes beyond it; without a step it is not."""
    session = try_values(make_session(1.0, 1.1, 0.9, 1.0).open_candidate(), 0.8, 0.75)
    first = session.judge()
    again = session.record(first).judge()
    assert first.verdict == "undecided" and again.p_value > first.p_value


def test_a_candidate_that_diverged_is_closed_and_its_finite_runs_count() -> None:
    session = try_values(make_session(1.0, 1.1, 0.9, 1.0).open_candidate(), 0.8, 0.9, math.nan)
    closed = session.record(session.judge())
    assert closed.candidate is None and closed.noise.freedom == 1
    assert closed.noise.sum_squares == pytest.approx(0.005)


def test_runs_and_candidates_out_of_turn_are_refused() -> None:
    session = make_session(1.0)
    with pytest.raises(ValueError, match="no candidate is open"):
        session.add_run(Measurement(1.0), "candidate")
    with pytest.raises(ValueError, match="a run of the base came to inf"):
        session.add_run(Measurement(math.inf), "base")
    with pytest.raises(ValueError, match="a candidate is open"):
        session.open_candidate().open_candidate()


def test_a_base_in_turns_is_measured_after_two_other_runs() -> None:
    session = make_session(1.0, 1.1, 0.9, 1.0, goal=Goal(design="interleaved"))
    for expected in ("candidate", "candidate", "base"):
        assert session.choose_next_run() == NextRun(expected)
        session = try_values(session.open_candidate(), 2.0).withdraw_candidate()


def test_a_night_goes_on_from_its_json_as_if_it_had_not_been_killed() -> None:
    def play(is_killed: bool) -> list[tuple[str, float]]:
        draw, session = Random(0), PlatformTrial(Goal("max", "log"))
        found: list[tuple[str, float]] = []
        for number in range(12):
            session = session.open_candidate()
            verdict = "undecided"
            while verdict == "undecided":
                of = session.choose_next_run().of
                mean = 12.0 if of == "candidate" and number % 4 == 3 else 10.0
                run = Measurement(draw.gauss(mean, 0.5), number, draw.random())
                session = session.add_run(run, of)
                if is_killed:
                    session = PlatformTrial.from_dict(json.loads(json.dumps(session.as_dict())))
                judgement = session.judge()
                session, verdict = session.record(judgement), judgement.verdict
                found.append((verdict, judgement.p_value))
        return found

    found = play(True)
    assert found == play(False)
    assert {verdict for verdict, _ in found} == {"undecided", "keep", "discard"}


def test_a_run_that_diverged_survives_strict_json() -> None:
    session = try_values(make_session(1.0, 1.1).open_candidate(), -math.inf)
    text = json.dumps(session.as_dict(), allow_nan=False)
    assert PlatformTrial.from_dict(json.loads(text)) == session
    assert PlatformTrial.from_dict(make_session(1.0).as_dict()) == make_session(1.0)
