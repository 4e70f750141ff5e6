"""Which trainings a command line makes, and what it refuses before the first."""

from pathlib import Path

import pytest
import torch

from flows.cli.compare_command import parse_comparison
from headroom.comparison.grid import GridCheck, split_values
from headroom.settings.read_settings import ConfigError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("64,256", ["64", "256"]),
        (" a , b ", ["a", "b"]),
        ("[64],[64,32]", ["[64]", "[64,32]"]),
        ("{hidden: [1,2]},{}", ["{hidden: [1,2]}", "{}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("", [""]),
    ],
)
def test_values_are_split_outside_of_brackets(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_every_combination_is_a_training_and_repeats_go_in_turns() -> None:
    asked = parse_comparison(
        ["--vary", "optim.lr=1e-2,0.1", "--devices", "cpu,auto", "--repeats", "2"]
        + ["--train.epochs=3", "--vary=train.precision=fp32"]
    )
    assert len(asked.cells) == 8 and asked.varied == ["device.name", "optim.lr", "train.precision"]
    assert [cell.number for cell in asked.cells] == list(range(1, 9))
    assert [cell.repeat for cell in asked.cells] == [1] * 4 + [2] * 4
    first = asked.cells[0]
    assert first.label == "device.name=cpu, optim.lr=1e-2, train.precision=fp32"
    assert (first.config.optim.lr, first.config.device.name) == (0.01, "cpu")
    assert {cell.config.train.epochs for cell in asked.cells} == {3}
    labels = [cell.label for cell in asked.cells]
    assert labels[4:] == labels[3::-1], "of a machine that grows slower the last would be slower"


def test_repeats_have_seeds_of_their_own_where_the_seed_does_not_vary() -> None:
    """All repeats of a training had one seed: on a CPU their scores were one score."""
    words = ["--vary", "optim.lr=1e-2,0.1", "--repeats", "3", "--train.seed", "7"]
    asked = parse_comparison(words).cells
    assert [cell.config.train.seed for cell in asked] == [7, 7, 8, 8, 9, 9]
    assert "train.seed" not in asked[-1].settings
    asked = parse_comparison(["--vary", "train.seed=1,5", "--repeats", "2"]).cells
    assert [cell.config.train.seed for cell in asked] == [1, 5, 5, 1]


def test_a_check_tells_the_data_by_their_fingerprints(tmp_path: Path) -> None:
    """A comparison goes on with the same rows alone."""
    rows, found = tmp_path / "rows.csv", []
    for last in ("1,2,up", "1,2,down"):
        rows.write_text("a,b,y\n" + "1,2,up\n2,1,down\n" * 50 + last + "\n")
        words = ["--data.source", "csv", "--data.path", str(rows), "--data.target", "y"]
        words += ["--data.cache", str(tmp_path / "cache"), "--device.name", "cpu"]
        check = GridCheck(parse_comparison([*words, "--vary", "optim.lr=0.1,0.01"]).cells)
        check.answer()
        found.append(check.data)
    assert [set(one) for one in found] == [{"csv"}, {"csv"}] and found[0] != found[1]


def test_all_devices_are_those_that_detection_finds() -> None:
    """Asked of a process of its own: this one would keep a context on each GPU."""
    asked = parse_comparison(["--devices", "all", "--repeats", "2"])
    here = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    assert [cell.device for cell in asked.cells] == here * 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--vary train.batchsize=1,2", "train.batchsize: unknown setting; did you mean"),
        ("--vary train.batch_size=0,8 --vary optim.lr=x,1", "optim.lr: must be a valid number"),
        (
            "--vary train.batch_size=0,8 --vary optim.lr=x,1",
            "train.batch_size: must be greater than or equal to 1",
        ),
        ("--vary train.batch_size", "--vary train.batch_size: must be NAME=VALUE,VALUE"),
        ("--vary optim.lr=1,,2", "optim.lr: one that is empty among its values"),
        ("--vary optim.lr=1,1", "optim.lr: one twice among its values"),
        ("--vary optim.lr=1 --vary optim.lr=2", "optim.lr is varied already"),
        ("--vary run.name=a,b", "run.name is a name, and makes no other training"),
        ("--vary optim.lr=1,2 --optim.lr 3", "optim.lr: is given 2 times"),
        ("--vary model.name=no.such:Net,mlp", "model.name"),
        ("--vary optim.lr=1 --last 3", "--vary: trains anew, and --last reads runs that exist"),
        ("--last 3 --train.epochs 4", "--train.epochs: trains nothing beside --last"),
        ("--runs a --last 3", "--runs: names the runs already"),
        ("--vary optim.lr=1,2 --resume latest", "--resume: is of `python -m flows.train`"),
        ("", "--vary: nothing varies"),
        (f"--vary train.seed={','.join(map(str, range(1001)))}", "makes 1,001 trainings"),
    ],
)
def test_bad_words_are_refused_all_at_once(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_comparison(words.split())
    assert told in str(refused.value)
