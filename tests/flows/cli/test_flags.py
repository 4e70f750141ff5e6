"""The command line: which words are taken, which are refused and how, and what --help shows."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.cli.flags import parse_training
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig

ROOT = Path(__file__).parents[3]


def _said(*words: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_training(words)
    return caught.value.problems


def test_no_words_mean_the_defaults() -> None:
    asked = parse_training([])
    assert asked.config == RunConfig()
    assert asked.config_file is None
    assert (asked.dry_run, asked.forecast, asked.explain_device, asked.debug) == (False,) * 4


def test_flags_win_over_the_file_and_switches_are_told(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("optim: {lr: 1, args: {eps: 0.5}}")
    asked = parse_training(
        [
            "--debug",
            "--config",
            str(file),
            "--optim.lr=2",
            "--dry-run",
            "--forecast",
            "--explain-device",
        ]
    )
    assert (asked.config.optim.lr, asked.config.optim.args) == (2, {"eps": 0.5})
    assert asked.config_file == str(file)
    assert (asked.dry_run, asked.forecast, asked.explain_device, asked.debug) == (True,) * 4


def test_values_may_be_empty_spaced_or_hold_equals_signs() -> None:
    words = ["--data.source", "csv", "--data.path=a=b", "--data.cache", "a b", "--data.target="]
    data = parse_training([*words, "--run.name", "-x", "--run.experiment=--y"]).config
    assert (data.data.path, data.data.target, data.data.cache) == ("a=b", "", "a b")
    assert (data.run.name, data.run.experiment) == ("-x", "--y")


@pytest.mark.parametrize(
    "words, value",
    [
        (["--train.deterministic"], True),
        (["--train.deterministic", "--dry-run"], True),
        (["--train.deterministic", "true"], True),
        (["--train.deterministic", "false"], False),
        (["--train.deterministic=False"], False),
    ],
)
def test_a_bare_bool_means_true(words: list[str], value: bool) -> None:
    assert parse_training(words).config.train.deterministic is value


def test_a_number_below_zero_is_a_value_and_no_flag() -> None:
    """argparse of Python 3.11 takes -1e-3 for a flag."""
    words = ["--model.name=mine:Net", "--model.args.low", "-1e-3", "--model.args.high", "-0.1"]
    assert parse_training(words).config.model.args == {"low": -1e-3, "high": -0.1}


def test_arguments_of_the_model_are_yaml_json_or_one_by_one() -> None:
    words = ["--model.args.dropout", "0.1", "--model.args", '{"hidden": [64]}']
    assert parse_training(words).config.model.args == {"hidden": [64], "dropout": 0.1}
    assert parse_training(["--model.args", "{hidden: [64]}"]).config.model.args == {"hidden": [64]}


@pytest.mark.parametrize(
    "words, said",
    [
        (["--optim.lr", "-0.1"], "optim.lr: must be greater than 0 (got -0.1)"),
        (["--optim.lr", "-.inf"], "optim.lr: must be a finite number (got -inf)"),
        (["--optim.lr"], "--optim.lr: expected one argument; see --help"),
        (["--optim.lr", "--dry-run"], "--optim.lr: expected one argument; see --help"),
        (["--data.path"], "--data.path: expected one argument; see --help"),
        (["--model.args.x"], "model.args.x: expected one argument; see --help"),
        (["--config"], "--config: expected one argument; see --help"),
        (["--config", "a", "--config=b"], "--config: is given 2 times ('a', then 'b'); keep one"),
        (["--optim.lr=1", "--optim.lr", "2"], "optim.lr: is given 2 times ('1', then '2'); keep"),
        (["--dry-run=no"], "--dry-run: ignored explicit argument 'no'; see --help"),
        (["--dry-run", "no"], "no: unknown word; settings are given as --section.name VALUE"),
        (["train"], "train: unknown word; settings are given as --section.name VALUE"),
        (["-v"], "-v: unknown word; settings are given as --section.name VALUE"),
        (["--"], "--: unknown word; settings are given as --section.name VALUE"),
        ([""], ": unknown word; settings are given as --section.name VALUE"),
        (["--dryrun"], "--dryrun: unknown option; did you mean --dry-run?"),
        (["--dry"], "dry: unknown setting; the sections are device, "),
        (["--conf", "x"], "--conf: unknown option; did you mean --config?"),
        (["--optim.l", "1"], "optim.l: unknown setting; did you mean optim.lr?"),
        (["--optim.leraning_rate=1"], "optim.leraning_rate: unknown setting; did you mean optim."),
        (["--batch-size", "8"], "batch-size: unknown setting; did you mean train.batch_size?"),
        (["--gpu", "1"], "gpu: unknown setting; did you mean device.name?"),
        (["--verbose"], "verbose: unknown setting; the sections are device, data, model, "),
        (
            ["--device.name", "cpu:3"],
            "device.name: must be auto, gpu, cuda, cuda:INDEX, rocm, rocm",
        ),
        (["--config", "missing.yaml"], "missing.yaml: is not there (looked in "),
        (["--config="], "--config: is not there (looked in "),
    ],
)
def test_a_wrong_word_is_told(words: list[str], said: str) -> None:
    problems = _said(*words)
    assert problems[0].startswith(said)
    assert len(problems) == (2 if words[:1] == ["--config"] and len(words) == 3 else 1)


def test_all_wrong_words_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("optim: {lr: 0}")
    assert _said("x", "--config", str(file), "--seed", "1", "--train.epochs", "0", "--dbug") == (
        "x: unknown word; settings are given as --section.name VALUE",
        "--dbug: unknown option; did you mean --debug?",
        f"{file}:1 optim.lr: must be greater than 0 (got 0)",
        "train.epochs: must be greater than or equal to 1 (got 0)",
        "seed: unknown setting; did you mean train.seed?",
    )


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_shows_every_setting_within_80_columns(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_training([word, "--optim.lr", "-1"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for name in RunConfig().flat():
        assert f"  --{name} " in shown
    flowing = " ".join(shown.split())
    assert "Peak learning rate. Above 0, at most 1,000. Default: 0.002." in flowing
    assert "on a CPU fp32. One of auto, fp32, tf32, bf16, fp16. Default: auto." in flowing
    for option in (
        "--config FILE",
        "--dry-run",
        "--forecast",
        "--for GPU,GPU",
        "--explain-device",
        "--debug",
        "examples:",
    ):
        assert option in flowing


def test_every_example_of_the_help_is_understood(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shlex

    (tmp_path / "config.yaml").write_text("optim: {lr: 1e-3}\ntrain.epochs: 5\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        parse_training(["--help"])
    command = "  python -m flows.train"
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith(command)]
    assert len(lines) == 5
    for line in lines:
        parse_training(shlex.split(line.removeprefix(command)))


def test_help_and_errors_import_nothing_slow() -> None:
    code = (
        "import sys; from flows.cli.flags import parse_training; parse_training([])\n"
        "print([m for m in ('torch', 'prefect', 'mlflow', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


_WORDS = st.one_of(
    st.sampled_from(
        ["--optim.lr", "--dry-run", "--model.args", "--model.args.x", "-0.1", "--", "="]
    ),
    st.sampled_from(
        ["--data.scale", "--train.epochs=2", "--config=", "--optim", "{a: [1]}", "none"]
    ),
    st.text(max_size=5),
    st.text(max_size=5).map("--{}".format),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_WORDS, max_size=5))
def test_any_words_give_a_config_or_a_config_error(words: list[str]) -> None:
    try:
        assert isinstance(
            parse_training([w for w in words if w not in ("-h", "--help")]).config, RunConfig
        )
    except ConfigError as error:
        assert error.problems and all(p.isprintable() for p in error.problems)
