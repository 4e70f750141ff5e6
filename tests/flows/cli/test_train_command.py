"""`python -m flows.train` as its users start, interrupt and kill it."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from flows.cli.train_command import main
from tests.conftest import PYTHON, desk_environment, is_training
from tests.run_folders import LOG, is_held, read_end

Desk = Callable[..., "subprocess.Popen[str]"]
LONG = ("--data.source", "synthetic", "--train.epochs", "100000", "--train.log_every", "50")


def _ask(place: Path, query: str) -> list[tuple]:
    with closing(sqlite3.connect(f"file:{place}/mlflow.db?mode=ro", uri=True)) as opened:
        return opened.execute(query).fetchall()


def _until(what: Callable[[], object], *, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            if what():
                return
        except sqlite3.Error:
            pass  # not there yet
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def _kept(place: Path) -> int:
    """How many records of the training loss the run itself has kept by now."""
    files = (place / ".headroom" / "runs").glob("*/events.jsonl")
    lines = (line for file in files for line in file.read_text().splitlines())
    return sum('"train/loss"' in line and '"status"' not in line for line in lines)  # but its end


def test_one_command_trains_and_tells_where_to_look(desk: Desk, place: Path) -> None:
    process = desk("--run.experiment", "mine", cold=True)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    # "3.03 s in all" was said after 15 s: imports and the end are stages too.
    ((started_at, end_ms),) = _ask(
        place,
        "SELECT t.value, r.end_time FROM runs r JOIN tags t USING (run_uuid)"
        " WHERE t.key = 'process.started_at'",
    )
    waited_s = end_ms / 1000 - float(started_at)
    ((said_s,),) = _ask(place, "SELECT value FROM latest_metrics WHERE key = 'time/total_s'")
    assert 0.9 * waited_s - 0.5 < said_s <= waited_s + 0.1
    (shown_s,) = re.findall(r"  ([0-9.]+) s in all", out)
    assert float(shown_s) == pytest.approx(said_s, abs=0.06)
    (speed,) = re.findall(r"([0-9,]+) samples/s", out)
    assert "  val accuracy 0.9" in err and f"  {speed} samples/s" in err
    assert re.search(r"\bstart +[0-9]", out) and re.search(r"\bclose +[0-9]", out)
    assert (
        "FINISHED" in out
        and "python -m headroom.services.serve ui" in out
        and "Traceback" not in err
    )
    ((status, experiment),) = _ask(
        place,
        "SELECT r.status, e.name FROM runs r JOIN experiments e USING (experiment_id)",
    )
    assert (status, experiment) == ("FINISHED", "mine")
    keys = {key for (key,) in _ask(place, "SELECT key FROM latest_metrics")}
    groups = {key.split("/")[0] for key in keys}
    assert {"train", "val", "speed", "time", "memory"} <= groups
    assert len(keys) >= 35


def test_a_line_is_printed_before_anything_slow_is_imported(place: Path) -> None:
    """There was nothing to be seen for 7 s."""
    code = """
import sys
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "prefect", "mlflow", "pyarrow", "sklearn", "numpy"):
            raise SystemExit(f"imports {name}")
sys.meta_path.insert(0, Slow())
from flows.cli.train_command import main
main([])
"""
    command = [sys.executable, "-c", code]
    environment = desk_environment(place)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    first, second = done.stderr.splitlines()
    assert first == "mlp on digits: loading PyTorch, Prefect and MLflow ..."
    assert second.startswith("imports ")


def test_a_call_from_python_is_the_same_training_on_the_same_server(place: Path) -> None:
    """A dict was refused by pydantic in 40 lines, and Prefect started a server of its own."""
    home = Path(os.environ["PREFECT_HOME"])
    code = """
from flows.train import train
try:
    train({"train": {"epochz": 1}})
except ValueError as error:
    print(error)
run = train({"train": {"epochs": 1}, "run.name": "called from Python"})
print(run["status"], run["name"])
"""
    command = [sys.executable, "-c", code]
    environment = {**desk_environment(home), "TESTS_WARM_KIND": "torch"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    lines = done.stdout.splitlines()
    assert lines[0] == "train.epochz: unknown setting; did you mean train.epochs?", done.stderr
    assert lines[1].startswith("FINISHED called from Python  val/accuracy ")
    assert lines[-1] == "FINISHED called from Python"
    assert "Open     python -m headroom.services.serve ui" in done.stdout
    assert "epoch 1/1" in done.stderr and "Flow run" not in done.stderr
    assert (home / "headroom-server.lock").exists(), "the shared server"
    with closing(sqlite3.connect(home / "prefect.db")) as opened:
        query = "SELECT COUNT(*) FROM flow_run WHERE name = 'called from Python'"
        assert opened.execute(query).fetchall() == [(1,)]


def _tasks(home: Path) -> int:
    with closing(sqlite3.connect(home / "prefect.db")) as opened:
        query = "SELECT COUNT(*) FROM task_run WHERE state_type = 'COMPLETED'"
        return int(opened.execute(query).fetchone()[0])


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGTERM, 143, "terminated\n"),
        (signal.SIGHUP, 129, "hung up\n"),
        (signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_a_run_that_is_ended_says_so(
    desk: Desk, place: Path, number: int, code: int, word: str
) -> None:
    process = desk(*LONG)
    # Not for MLflow's: they are sent slowly where every core is busy.
    _until(lambda: _kept(place) > 5)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err and err.endswith(word)
    _until(lambda: _ask(place, "SELECT status FROM runs") == [("KILLED",)], timeout_s=60)
    ((end_time,),) = _ask(place, "SELECT end_time FROM runs")
    assert end_time
    sent = _ask(place, "SELECT COUNT(*) FROM metrics WHERE key = 'train/loss'")
    assert sent == [(_kept(place),)]
    if number != signal.SIGKILL:
        released = "SELECT value FROM latest_metrics WHERE key = 'memory/release_ok'"
        assert _ask(place, released) == [(1.0,)]


@pytest.mark.parametrize("after_s", [0.4, 1.5, 4.0])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_ended_before_its_run_begins_says_one_word(
    desk: Desk, place: Path, after_s: float, number: int, code: int
) -> None:
    """Each Ctrl-C before the flow was a traceback."""
    process = desk(*LONG, cold=True)
    _until(lambda: b"SigCgt:\t0000000000004003" in _status(process.pid))  # ours: 1, 2 and 15
    time.sleep(after_s)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1] in ("interrupted", "terminated") and "Traceback" not in err
    database = place / "mlflow.db"
    ended = [], [("KILLED",)]  # where it had begun by then, its sender ends it a moment later
    _until(lambda: not database.exists() or _ask(place, "SELECT status FROM runs") in ended)


def _status(pid: int) -> bytes:
    return Path(f"/proc/{pid}/status").read_bytes()


def test_the_next_run_marks_a_killed_one_as_crashed_in_prefect(desk: Desk, place: Path) -> None:
    """It said Running for ever, with nobody left who could end it."""
    home = place / "home"
    killed = desk(*LONG, home=home, cold=True)
    _until(lambda: _kept(place) > 5)
    (sender,) = (
        p
        for p in psutil.Process(killed.pid).children()
        if "headroom.tracking.mlflow_sender" in p.cmdline()
    )
    (lock,) = (place / ".headroom" / "runs").glob("*/sending.lock")
    killed.send_signal(signal.SIGSTOP)
    sender.kill()  # with the whole machine: else it says so itself, at once
    _until(lambda: not is_held(lock))
    killed.kill()
    killed.communicate()
    process = desk("--data.source", "synthetic", "--train.epochs", "1", home=home)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    _until(lambda: _states(home) == ["COMPLETED", "CRASHED"], timeout_s=60)
    both = [("FINISHED",), ("KILLED",)]  # its sender ends it after the run of now
    _until(lambda: sorted(_ask(place, "SELECT status FROM runs")) == both, timeout_s=60)


def _states(home: Path) -> list[str]:
    with closing(sqlite3.connect(home / "prefect.db")) as opened:
        found = opened.execute("SELECT state_type FROM flow_run ORDER BY 1").fetchall()
    return [state for (state,) in found]


def test_the_first_four_runs_ever_at_once_all_finish_and_prefect_has_their_tasks(
    desk: Desk, place: Path
) -> None:
    home = place / "a new prefect home"
    started = [desk("--train.epochs", "1", "--run.experiment", "four", home=home) for _ in range(4)]
    for process in started:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    runs = _ask(
        place,
        "SELECT r.status, e.name FROM runs r JOIN experiments e USING (experiment_id)",
    )
    assert runs == [("FINISHED", "four")] * 4
    _until(lambda: _tasks(home) == 16, timeout_s=30)
    with closing(sqlite3.connect(home / "prefect.db")) as opened:
        names = opened.execute("SELECT DISTINCT state_type FROM task_run").fetchall()
        flows = opened.execute("SELECT state_type FROM flow_run").fetchall()
    assert names == [("COMPLETED",)] and flows == [("COMPLETED",)] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optim.lr", "-0.1"], "optim.lr: must be"),
        (["--optim.leraning_rate", "0.1"], "did you mean"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--data.source", "csv", "--data.path", "nowhere.csv"], "data.path: "),
        (["--device.name", "tpu"], "device.name: "),
    ],
)
def test_bad_input_costs_nothing(
    desk: Desk, place: Path, arguments: list[str], message: str
) -> None:
    process = desk(*arguments)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert message in err and "Traceback" not in err and out == ""
    assert sorted(f.name for f in place.iterdir()) == ["mlflow.yaml"]


def test_a_dry_run_shows_the_settings_and_the_device_and_leaves_nothing(
    desk: Desk, place: Path
) -> None:
    out, err = desk("--dry-run", "--optim.lr", "0.5").communicate(timeout=60)
    assert "lr: 0.5" in out and "# device: cpu" in out, err
    assert sorted(f.name for f in place.iterdir()) == ["mlflow.yaml"]


@pytest.mark.parametrize(("limit", "code", "said"), [("1000", 0, "yes"), ("0.1", 2, "NO")])
def test_a_forecast_is_a_table_and_its_exit_code_tells_whether_it_fits(
    place: Path, capsys: pytest.CaptureFixture[str], limit: str, code: int, said: str
) -> None:
    assert main(["--forecast", "--memory.limit_mib", limit]) == code
    out = capsys.readouterr().out
    assert "predicted peak" in out and "optimizer_state" in out and said in out
    assert not (place / "mlflow.db").exists()


@pytest.mark.parametrize(("gpu", "code"), [("T4", 0), ("1025MiB", 1), ("x5", 2)])
def test_a_training_can_be_required_to_fit_a_gpu(
    place: Path, capsys: pytest.CaptureFixture[str], gpu: str, code: int
) -> None:
    assert main(["--forecast", "--require", "l4", "--require", gpu]) == code
    said = capsys.readouterr()
    assert said.err.count("\n") == bool(code) and ("l4" in said.out) is (code < 2)
    assert code != 1 or said.err.startswith("--require: a step does not fit 1025mib: it needs")


def test_explain_device_answers_as_a_table(desk: Desk) -> None:
    process = desk("--explain-device")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "finding" in out and "remedy" in out


def test_a_home_that_cannot_be_written_is_said(desk: Desk, place: Path) -> None:
    (place / "file").write_text("")
    process = desk(home=place / "file" / "prefect")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "\nPREFECT_HOME: " in err and "Traceback" not in err


def test_the_environment_of_a_desk_names_no_api() -> None:
    assert "PREFECT_API_URL" not in desk_environment(Path("/tmp/x"))


@pytest.mark.parametrize(("number", "said"), [(15, "terminated"), (2, "interrupted")])
def test_the_exit_code_is_that_of_the_record_where_a_signal_comes_at_the_end(
    desk: Desk, place: Path, number: int, said: str
) -> None:
    """2 of 10 that were terminated in the close ended with 143 and were FINISHED in MLflow: the
    scheduler trained them once more."""
    process = desk("--train.epochs", "60")
    runs = place / ".headroom" / "runs"
    _until(lambda: is_training(place))
    with closing(sqlite3.connect(place / "mlflow.db", timeout=30)) as database:
        database.execute("BEGIN IMMEDIATE")  # so that the close waits
        (folder,) = (log.parent for log in runs.glob(f"*/{LOG}"))
        assert not read_end(folder)
        _until(lambda: read_end(folder))
        process.send_signal(number)
        time.sleep(0.5)
        assert number == 2 or process.poll() is None
        database.rollback()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"\n{said} when the training had ended: FINISHED in MLflow" in err
    assert "Release  OK" in out and "Traceback" not in err
    _until(lambda: _ask(place, "SELECT status FROM runs") == [("FINISHED",)])


def test_a_training_of_one_process_loads_no_package_that_it_does_not_need() -> None:
    """FSDP came with the type of a field: sympy, DTensor and 600 modules more in every run."""
    code = (
        "import sys, {}\n"
        "print(*sorted({{m if m.startswith('torch.distributed.') else m.partition('.')[0]"
        " for m in sys.modules}} - set(sys.stdlib_module_names)))"
    )

    def list_packages(modules: str) -> set[str]:
        words = [PYTHON, "-c", code.format(modules)]
        return {*subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()}

    own = list_packages("flows.train, headroom.training.checkpoints, safetensors.torch")
    theirs = list_packages("torch, prefect.main, prefect.flow_engine")
    more = {name for name in own - theirs if not name.startswith(("_cython", "__"))}
    allowed = {"headroom", "flows", "tasks", "psutil", "ruamel", "_ruamel_yaml", "safetensors"}
    allowed |= {"pynvml"}
    assert more <= allowed, more - allowed
