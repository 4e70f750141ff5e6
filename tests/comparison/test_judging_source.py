"""A session that judges: made runs through its real source of trainings, no training."""

import json
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headroom.comparison.judging_source import JudgingSource, open_candidate
from headroom.comparison.referee import close_session
from headroom.comparison.session import (
    CannotJudge,
    Session,
    draw_seed,
    hold_session,
    make_goal,
    make_session,
    read_session,
)
from headroom.comparison.session_page import write_session_page
from headroom.comparison.session_report import (
    describe_judgement,
    describe_session,
    make_session_text,
    make_text,
)
from headroom.comparison.sides import Side
from headroom.comparison.trainings import ComparisonFolder, TrainingEnd
from headroom.settings.read_settings import ConfigError, resolve_config
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import read_tracking_settings
from tests.run_folders import write_end, write_start

Figure = Callable[[int, int], float]  # of a run's value, by whose it is and its seed
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "answers.schema.json").read_text())
TAGS = {"data.fingerprint": "1", "host": "here", "device.model": "cpu"}
NULL, BETTER = Side("optim.lr=1", {"optim.lr": "1"}), Side("optim.lr=2", {"optim.lr": "2"})


def resolve(settings: Mapping[str, str]) -> RunConfig:
    return resolve_config(None, dict(settings))


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.chdir(tmp_path)
    made = make_session(tmp_path / "sessions" / "night", name="night", words=[], goal="val/loss")
    return replace(made, root=7)


def judge(
    session: Session, side: Side, figure: Figure, *, most_runs: int = 100, **more: Any
) -> JudgingSource:
    """Judge it by runs that come to what the figure says; more: of their ends."""
    open_candidate(session, side)
    source = JudgingSource(
        *(session, ComparisonFolder(session.folder, "night"), resolve),
        *(read_tracking_settings(), most_runs, Path.cwd()),
    )
    while (cell := source.take_next("cpu")) is not None:
        run = session.runs[cell.number - 1]
        assert cell.config.train.seed == run.seed
        folder = session.folder / f"run{cell.number}"
        folder.mkdir()
        write_start(folder, f"id{cell.number}")
        metrics = {
            session.goal_name: figure(run.of, run.seed),
            "memory/run_peak_allocated_mib": 9.0,
        }
        end = {"tags": TAGS, "metrics": metrics, **more}
        write_end(folder, end)
        ended = TrainingEnd(cell.number, "FINISHED", f"id{cell.number}")
        source.take_end(cell, replace(ended, **_status(more)), folder)
    return source


def _status(more: Mapping[str, Any]) -> dict[str, Any]:
    return {name: more[name] for name in ("status", "error") if name in more}


def draw(gain: float) -> Figure:
    """A loss of 1, noise of 1 %, and a gain of the candidates, as a share."""
    return lambda of, seed: (1 - (gain if of else 0)) * random.Random(seed).gauss(1.0, 0.01)


def test_a_gain_is_kept_and_is_the_base_of_the_next(session: Session) -> None:
    judge(session, BETTER, draw(0.1))
    kept = session.candidates[0]
    assert kept.verdict == "keep" and kept.gain is not None and kept.gain.gain > 0.05
    assert session.base.settings == {"optim.lr": "2"} and session.base_number == 1
    of_base = len(session.list_runs(1))
    judge(session, Side("optim.name=sgd", {"optim.name": "sgd"}), draw(0.1))
    assert session.candidates[1].verdict == "discard"
    assert [run for run in session.runs if run.of == 2], "it was trained"
    assert len(session.list_runs(1)) >= of_base, "the runs of the one that was kept are the base's"


def test_one_that_is_plainly_worse_ends_after_one_run(session: Session) -> None:
    judge(session, NULL, draw(-0.5))
    assert session.candidates[0].verdict == "discard" and len(session.list_runs(1)) == 1


def test_seeds_are_the_sessions_and_no_two_runs_share_one(session: Session) -> None:
    judge(session, NULL, draw(0.015), most_runs=6)
    seeds = [run.seed for run in session.runs]
    assert len(set(seeds)) == len(seeds) == 6
    assert seeds == [draw_seed(7, number) for number in range(1, 7)]
    with pytest.raises(ConfigError):
        resolve({"train.seed": str(2**64)})
    assert all(0 <= draw_seed(2**63, n) < 2**31 for n in range(100))


def test_a_kill_at_any_moment_loses_no_run(session: Session) -> None:
    judge(session, BETTER, draw(0.1), most_runs=3)
    again = read_session(session.folder)
    assert again.runs == session.runs and again.trial == session.trial
    waiting = again.plan_run(0, None)
    again.save()
    again = read_session(again.folder)
    judge(again, BETTER, draw(0.1))
    assert [run.number for run in again.runs].count(waiting.number) == 1
    assert again.runs[waiting.number - 1].status == "FINISHED"
    whole = make_session(session.folder.parent / "whole", name="whole", words=[], goal="val/loss")
    whole = replace(whole, root=7)
    judge(whole, BETTER, draw(0.1))
    assert whole.candidates[0].verdict == again.candidates[0].verdict == "keep"
    assert [r.figures for r in whole.runs] == [r.figures for r in again.runs]


def test_an_undecided_one_goes_on_or_makes_room(session: Session) -> None:
    judge(session, NULL, draw(0.015), most_runs=5)
    assert session.open is not None and session.candidates[0].verdict == "undecided"
    judge(session, BETTER, draw(0.1))
    assert [one.verdict for one in session.candidates] == ["discard", "keep"]
    assert session.trial.budget.candidates == 2, "the share of the first stays spent"


def test_a_candidate_on_other_rows_is_refused_by_name(session: Session) -> None:
    judge(session, NULL, draw(0.0), most_runs=4)
    judge(session, NULL, draw(0.0), tags={**TAGS, "data.fingerprint": "2"})
    one = session.candidates[0]
    assert one.verdict == "refused" and "data.fingerprint was 1 and is 2" in one.reason


def test_one_that_fails_is_discarded_and_a_base_that_fails_is_said(session: Session) -> None:
    judge(session, NULL, draw(0.0), most_runs=4)
    judge(session, NULL, draw(0.0), status="FAILED", error="it broke")
    assert session.candidates[0].verdict == "discard" and "it broke" in session.candidates[0].reason
    judge(session, BETTER, draw(0.0), metrics={"val/accuracy": 1.0})
    assert "val/loss was not measured" in session.candidates[1].reason
    fresh = make_session(session.folder.parent / "other", name="o", words=[], goal="val/loss")
    with pytest.raises(CannotJudge, match=r"the base could not be trained: it broke"):
        judge(fresh, NULL, draw(0.0), status="FAILED", error="it broke")


def test_another_figure_that_nobody_measures_is_said_at_once(session: Session) -> None:
    session.not_worse = {"val/nothing": 0.02}
    with pytest.raises(CannotJudge, match="val/nothing was not measured"):
        judge(session, BETTER, draw(0.1))
    assert len(session.runs) == 1


def test_a_gain_that_costs_too_much_speed_is_discarded(session: Session) -> None:
    session.not_worse = {"speed/samples_per_s": 0.02}

    def add_speed(of: int, seed: int) -> dict[str, float]:
        speed = (800 if of else 1000) * random.Random(seed + 1).gauss(1, 0.001)
        return {"val/loss": draw(0.1)(of, seed), "speed/samples_per_s": speed}

    judge_with(session, BETTER, add_speed)
    one = session.candidates[0]
    assert (
        one.verdict == "discard" and "speed/samples_per_s is worse by more than 2 %" in one.reason
    )
    session.not_worse = {"speed/samples_per_s": 0.3}
    judge_with(session, BETTER, add_speed)
    assert session.candidates[1].verdict == "keep"
    assert session.candidates[1].not_worse == {"speed/samples_per_s": "holds"}


def judge_with(
    session: Session, side: Side, figures: Callable[[int, int], dict[str, float]]
) -> None:
    open_candidate(session, side)
    source = JudgingSource(
        *(session, ComparisonFolder(session.folder, "night"), resolve),
        *(read_tracking_settings(), 100, Path.cwd()),
    )
    while (cell := source.take_next("cpu")) is not None:
        run = session.runs[cell.number - 1]
        folder = session.folder / f"run{cell.number}"
        folder.mkdir()
        write_end(folder, {"tags": TAGS, "metrics": figures(run.of, run.seed)})
        source.take_end(cell, TrainingEnd(cell.number, "FINISHED", f"id{cell.number}"), folder)


def test_no_speed_is_judged_on_a_machine_that_is_not_free(tmp_path: Path) -> None:
    goal = "speed/samples_per_s"
    session = make_session(tmp_path / "sessions" / "s", name="s", words=[], goal=goal)
    figures = {goal: 1000.0, "time/core_wait_pct": 40.0}
    with pytest.raises(CannotJudge, match="the machine is not free"):
        judge_with(session, NULL, lambda of, seed: figures)
    assert [run.status for run in session.runs] == ["BUSY"] * 3


def test_the_answer_is_one_document_that_json_knows(session: Session) -> None:
    source = judge(session, NULL, draw(0.015), most_runs=5)
    answer = describe_judgement(session, 1, 0, source.forecast(), bases_before=0)
    told = json.loads(json.dumps({"version": 1, **answer}, allow_nan=False))
    jsonschema.validate(told, SCHEMA["$defs"]["judgement"])
    assert told["verdict"] == "undecided"
    assert told["base"]["runs"] + told["tried"]["runs"] == told["cost"]["runs"] == 5
    assert told["memory"] == {"name": "memory/run_peak_allocated_mib", "base": 9.0, "tried": 9.0}
    assert make_text(session, answer)[0].startswith("undecided: optim.lr=1.")
    close_session(session)
    of_all = {"version": 1, **describe_session(session)}
    of_all = json.loads(json.dumps(of_all, allow_nan=False))
    jsonschema.validate(of_all, SCHEMA["$defs"]["session"])
    assert of_all["is_closed"] and of_all["candidates"][0]["verdict"] == "discard"
    assert 0 < of_all["budget"]["spent"] < of_all["budget"]["alpha"] == 0.05
    assert any("one run is good to +-" in line for line in make_session_text(session))


def test_the_page_shows_every_candidate_and_nothing_acts_as_markup(session: Session) -> None:
    judge(session, BETTER, draw(0.1), most_runs=1)
    with warnings.catch_warnings(action="error"):
        assert "how much a run varies" in write_session_page(session).read_text().lower()
    judge(session, BETTER, draw(0.1))
    judge(session, Side("optim.lr=<script>", {"optim.lr": "3"}), draw(-0.5))
    text = write_session_page(session).read_text()
    assert f"One run is good to &plusmn;{100 * (session.compute_noise() or 0):.2g} %" in text
    assert "2 candidates, 1 kept" in text
    assert text.index("optim.lr=2</td>") < text.index("optim.lr=&lt;script&gt;</td>")
    assert "<script" not in text and text.count("<img") == 1 and "data:image/png" in text


def test_two_judges_at_once_are_one_after_the_other(session: Session) -> None:
    session.save()
    with (
        hold_session(session.folder),
        pytest.raises(ConfigError, match="night is judging already"),
        hold_session(session.folder),
    ):
        pass
    with hold_session(session.folder) as again:
        assert again.root == session.root


def test_who_waited_for_the_lock_sees_what_the_other_has_done(session: Session) -> None:
    session.save()
    before = read_session(session.folder)
    with hold_session(session.folder) as first:
        judge(first, BETTER, draw(0.1), most_runs=3)
    with hold_session(session.folder) as second:
        assert len(second.runs) == 3 and not before.runs


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', '{"version": 99}'])
def test_a_session_that_can_not_be_read_is_one_sentence(session: Session, text: str) -> None:
    (session.folder / "session.json").write_text(text)
    with pytest.raises(ConfigError, match="session: "):
        read_session(session.folder)


def test_how_a_metric_is_judged() -> None:
    assert make_goal("val/loss").scale == "log" and make_goal("val/loss").direction == "min"
    assert make_goal("val/accuracy").scale == "linear"
    assert make_goal("val/accuracy").direction == "max"
    assert make_goal("speed/samples_per_s").design == "interleaved"
    assert make_goal("val/own", "min").direction == "min"
    with pytest.raises(ConfigError, match="say min:NAME or max:NAME"):
        make_goal("val/own")
