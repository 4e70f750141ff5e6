"""Settings from files, flags and overrides: what is read, and what each mistake is told."""

import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.settings import read_settings
from headroom.settings.arguments import OPTIMIZER_ARGS
from headroom.settings.read_settings import (
    MAX_BYTES,
    ConfigError,
    SettingsProblem,
    check_imports,
    collect_params,
    dump_yaml,
    find_config_secrets,
    hide_config_secrets,
    make_config,
    override_config,
    parse_value,
    resolve_config,
    restore_config_secrets,
    select_params,
)
from headroom.settings.run_config import FUSED, RunConfig
from headroom.settings.table import (
    MOVED,
    describe_unknown_setting,
    find_kind,
    list_arguments,
    list_settings,
    make_markdown_table,
)

LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n"
    for before, name in zip(ascii_letters, ascii_letters[1:], strict=False)
)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
END = (
    "must be how long, such as 6h, 45min or 90s, or a time of the clock in quotes, such as 06:30 "
    "or 2030-01-31 06:30"
)
EVERY = "must be how long, such as 5min or 90s, or how many steps, such as 500steps, or none"
DEVICE = "must be auto, gpu, cuda, cuda:INDEX, rocm, rocm:INDEX, xpu, mps or cpu"

# What stands in the file, and the whole of what is said about it, without the file's name.
TEXTS: list[tuple[str | bytes, str]] = [
    ("zzz: {lr: 1}", ":1 zzz.lr: unknown setting; did you mean optim.lr?"),
    ("zzz: {abc: 1}", ":1 zzz.abc: unknown setting; the sections are device, data, model, "),
    ("run: {x: 1}", ":1 run.x: unknown setting; run has name, experiment"),
    (
        "\n\noptim:\n  leraning_rate: 1",
        ":4 optim.leraning_rate: unknown setting; did you mean optim.lr?",
    ),
    ("train: {epochs: [1]}", ":1 train.epochs: must be a valid integer (got [1])"),
    ("optim: {lr: '0.1'}", ":1 optim.lr: must be a valid number (got '0.1'); drop the quotes"),
    ("optim: {lr: true}", ":1 optim.lr: must be a valid number (got true)"),
    ("data: {target: 3}", ":1 data.target: must be a valid string (got 3); put it in quotes"),
    ("optim: {lr: -0.1}", ":1 optim.lr: must be greater than 0 (got -0.1)"),
    ("optim: {lr: 0}", ":1 optim.lr: must be greater than 0 (got 0)"),
    ("optim: {lr: .nan}", ":1 optim.lr: must be a finite number (got nan)"),
    ("optim: {lr: .inf}", ":1 optim.lr: must be a finite number (got inf)"),
    ("optim: {lr: 1e999}", ":1 optim.lr: must be a finite number (got inf)"),
    ("optim: {lr: nan}", ":1 optim.lr: must be a valid number (got 'nan')"),
    ("train: {batch_size: 0}", ":1 train.batch_size: must be greater than or equal to 1 (got 0)"),
    ("train: {batch_size: -1}", ":1 train.batch_size: must be greater than or equal to 1 (got -1)"),
    (
        f"train: {{batch_size: {10**12}}}",
        ":1 train.batch_size: must be less than or equal to 10000000 (got 1000000000000)",
    ),
    ("train: {epochs: 0}", ":1 train.epochs: must be greater than or equal to 1 (got 0)"),
    ("train: {epochs: -1}", ":1 train.epochs: must be greater than or equal to 1 (got -1)"),
    ("train: {epochs: true}", ":1 train.epochs: must be a valid integer (got true)"),
    ("train: {end: 990}", f":1 train.end: {END} (got 990)"),  # of 16:30, by YAML 1.1
    ("train: {end: '6 hours'}", f":1 train.end: {END} (got '6 hours')"),
    ("train: {end: '6:30'}", f":1 train.end: {END} (got '6:30')"),
    ("train: {end: 0s}", f":1 train.end: {END} (got '0s')"),
    ("train: {end: 9999999999s}", f":1 train.end: {END} (got '9999999999s')"),
    ("train: {end: true}", f":1 train.end: {END} (got true)"),
    ("checkpoint: {every: 300}", f":1 checkpoint.every: {EVERY} (got 300)"),
    ("checkpoint: {every: 0steps}", f":1 checkpoint.every: {EVERY} (got '0steps')"),
    ("checkpoint: {every: 0.5steps}", f":1 checkpoint.every: {EVERY} (got '0.5steps')"),
    ("train: {epochs: 2.5}", ":1 train.epochs: must be a valid integer (got 2.5)"),
    ("train: {epochs: 1e3}", ":1 train.epochs: must be a valid integer (got 1000.0)"),
    (
        f"train: {{epochs: {10**30}}}",
        f":1 train.epochs: must be less than or equal to 1000000 (got {10**30})",
    ),
    ("train: {epochs: 1" + "0" * 5000 + "}", ": is not YAML: Exceeds the limit (4300 digits)"),
    ('train: {amp: "yes"}', ":1 train.amp: unknown setting; did you mean train.precision?"),
    ('data: {scale: "yes"}', ":1 data.scale: must be a valid boolean (got 'yes')"),
    ("data: {scale: yes}", ":1 data.scale: must be a valid boolean (got 'yes')"),
    ("train: {seed: -1}", ":1 train.seed: must be greater than or equal to 0 (got -1)"),
    (
        f"train: {{seed: {2**64}}}",
        f":1 train.seed: must be less than 9223372036854775808 (got {2**64})",
    ),
    ("device: {name: tpu}", f":1 device.name: {DEVICE} (got 'tpu')"),
    ('device: {name: "cuda:-1"}', f":1 device.name: {DEVICE} (got 'cuda:-1')"),
    ("device: {name: ''}", f":1 device.name: {DEVICE} (got '')"),
    ("device: {name: 'cuda:abc'}", f":1 device.name: {DEVICE} (got 'cuda:abc')"),
    ("device: {name: 'cpu:3'}", f":1 device.name: {DEVICE} (got 'cpu:3')"),
    ("device: {name: meta}", f":1 device.name: {DEVICE} (got 'meta')"),
    ("device: {name: 0}", ":1 device.name: must be a valid string (got 0); put it in quotes"),
    ("optim: {lr: 1}\noptim: {lr: 2}", ":2 optim: is written twice, first on line 1; keep one"),
    ("optim: {lr: 1, lr: 2}", ":1 optim.lr: is written twice, first on line 1; keep one"),
    ("optim:\n lr: 1\noptim.lr: 2", ":3 optim.lr: is written twice, first on line 2; keep one"),
    ("model: {args: {a: 1}}\nmodel.args.a: 1", ":2 model.args.a: is written twice, first on l"),
    ("model: {args: {a: {b: 1, b: 2}}}", ":1 model.args.a.b: is written twice, first on lin"),
    (
        "optim:\n\tlr: 1",
        ":2 is not YAML: while scanning for the next token found character '\\t' that cannot start "
        "any token; indent with spaces",
    ),
    (
        "optim: {lr: 1}\n---\noptim: {lr: 2}",
        ":2 is not YAML: expected a single document in the stream but found another document",
    ),
    (b"optim:\n  lr: 1\0\n", ":2 is not YAML: special characters are not allowed"),
    ('data: {cache: "a\\0"}', ":1 data.cache: must not hold a NUL character"),
    ('data: {cache: "\\ud800"}', ":1 data.cache: must be a valid string, unable to parse raw data"),
    ('data: {cache: "\\UFFFFFFFF"}', ": is not YAML: "),
    ("run:\n  name: a\x07b", ":2 is not YAML: special characters are not allowed"),
    ("# \u00e9\nrun: {name: caf\u00e9}".encode("latin-1"), ":1 is not UTF-8 (byte 0xe9); save it"),
    ("optim: {lr: 1}".encode("utf-16"), ":1 is not UTF-8 (byte 0xff); save it as UTF-8"),
    ("", ":1 must hold sections, such as 'optim: {lr: 0.01}' (got null)"),
    ("# nothing yet\n---\n", ":3 must hold sections, such as 'optim: {lr: 0.01}' (got null)"),
    ("- optim", ":1 must hold sections, such as 'optim: {lr: 0.01}' (got ['optim'])"),
    ("# here\n\noptim", ":3 must hold sections, such as 'optim: {lr: 0.01}' (got 'optim')"),
    ("[" * 2000 + "]" * 2000, ": is not YAML: maximum recursion depth exceeded"),
    ("{a: " * 2000 + "}" * 2000, ": is not YAML: maximum recursion depth exceeded"),
    ("- " * 2000, ": is not YAML: maximum recursion depth exceeded"),
    ("a: [" + "1," * 50_000 + "]", ":1 holds over 50,000 values"),
    (LAUGHS, ":1 holds over 50,000 values"),
    (
        "run: {name: *x}",
        ":1 is not YAML: found undefined alias 'x'",
    ),
    (
        "a: !!python/object/apply:os.system ['false']",
        ":1 has a tag, tag:yaml.org,2002:python/object/apply:os.system; leave it out",
    ),
    (
        "a: !!python/object/apply:os.system false",
        ":1 has a tag, tag:yaml.org,2002:python/object/apply:os.system; leave it out",
    ),
    ("model: {args: {a: !!binary aGk=}}", ":1 has a tag, tag:yaml.org,2002:binary; leave it out"),
    ("model: {args: {a: !own 5}}", ":1 has a tag, !own; leave it out"),
    ("data: {scale: !!bool maybe}", ": is not YAML: 'maybe'"),
    ("train: {epochs: !!int x}", ": is not YAML: invalid literal for int() with base 10: 'x'"),
    ("1: {lr: 1}", ":1 has a name that is not text; put it in quotes"),
    ("? [a]\n: 1", ":1 has a name that is not text; put it in quotes"),
    ("optim: 3", ":1 optim: is a section; give its settings by name, such as optim.name (got 3)"),
    (
        "optim:\ntrain: {epochs: 2}",
        ":1 optim: is a section; give its settings by name, such as optim.name (got null)",
    ),
    ("model: {args: 3}", ":1 model.args: must be a valid dictionary (got 3)"),
    ("optim: {lr: {x: 1}}", ":1 optim.lr: must be a valid number (got {'x': 1})"),
    ("{optim: {lr: 1}}}", ":1 is not YAML: expected '<document start>', but found ('}',)"),
    (
        "optim: {lr: 1",
        ":1 is not YAML: while parsing a flow mapping expected ',' or '}', but got '<stream end>'",
    ),
    ("optim: {name: adam}", ":1 optim.name: must be one of adamw, sgd, Adadelta"),
    ("run: {name: ''}", ":1 run.name: must have at least 1 character (got '')"),
    (f"run: {{name: {'x' * 300}}}", ":1 run.name: must have at most 250 characters (got 'x"),
    ('run: {name: "a\\nb"}', ":1 run.name: must be printable text on one line (got 'a\\nb')"),
    ("\ndata:\n  source: csv", ":3 data.path: is needed for source csv; name the file to read"),
    ("data: {path: x}", ":1 data.source: the ending of 'x' does not tell; set data.source to one"),
    (
        "data: {path: x.csv, source: synthetic}",
        ":1 data.path: has no meaning for source synthetic (got 'x.csv'); set data.source",
    ),
    ("data: {path: x.npy, args: {drop: [a]}}", ":1 data.args.drop: npy takes no arguments"),
    ("data: {args: {a: 1}}", ":1 data.args.a: digits takes no arguments"),
    (
        "data: {path: x.csv, args: {drop: [1]}}",
        ":1 data.args.drop.0: must be a valid string (got 1); put it in quotes",
    ),
    (
        "model: {name: 'os:'}",
        ":1 model.name: must be one of linear, mlp, cnn, transformer, or pack",
    ),
    (
        "train: {metrics: {own: f1}}",
        ":1 train.metrics: own must be package.module:function (got 'f1'",
    ),
    (
        "train: {metrics: {rmse: mine:rmse}}",
        ":1 train.metrics: 'rmse' is the name of a figure of the task itself; give yours another",
    ),
    (
        "train: {batch_size: 2, accumulate: 3}",
        ":1 train.accumulate: must be at most train.batch_size (got 3 for a batch of 2)",
    ),
]


def _said(file: str | None, flags: dict[str, Any] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve_config(file, flags or {})
    return caught.value.problems


def test_no_row_of_the_table_was_lost() -> None:
    assert len(TEXTS) == 97


@pytest.mark.parametrize("text, said", TEXTS, ids=[repr(t)[:40] for t, _ in TEXTS])
def test_a_wrong_file_is_told_in_one_line_with_its_place(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems = _said(str(file))
    assert problems[0].startswith(f"{file}{said}")
    assert all(problem.isprintable() and len(problem) < 400 for problem in problems)


@pytest.mark.parametrize(
    "path, said",
    [
        ("missing.yaml", "is not there (looked in "),
        (".", "is a folder, pipe or device; name a YAML file"),
        ("/dev/zero", "is a folder, pipe or device; name a YAML file"),
        pytest.param("/proc/self/mem", "cannot be read (Input/output error)", marks=LINUX),
        ("a\0b", "embedded null"),
        ("x" * 5000, "cannot be read (File name too long); check the path and its rights"),
        ("", "is not there"),
    ],
)
def test_what_is_no_file_is_refused_without_reading_it(path: str, said: str) -> None:
    assert said in _said(path)[0]


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "is a folder, pipe or device" in _said(str(tmp_path / "fifo"))[0]


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("optim: {lr: 1}")
    file.chmod(0)
    user = os.geteuid()
    if user == 0:  # root may read everything
        os.seteuid(65534)
    try:
        said = _said(str(file))
    finally:
        os.seteuid(user)
    assert said == (f"{file}: cannot be read (Permission denied); check the path and its rights",)


def test_a_file_over_256_kib_is_refused_and_one_below_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("#" * (MAX_BYTES - 20) + "\noptim: {lr: 1.5}")
    assert resolve_config(str(file), {}).optim.lr == 1.5
    file.write_text("#" * (MAX_BYTES + 1))
    assert _said(str(file))[0].endswith(
        "is larger than 256 KiB; a settings file holds only settings"
    )


def test_all_problems_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("train:\n  epochs: 0\n  batch: 8\n  epochs: 2\noptim: {lr: -1}\noptim: {}\n")
    assert _said(str(file), {"train.seed": "-1", "sed": "1", "optim.args.betas": "[1, 0]"}) == (
        f"{file}:2 train.epochs: must be greater than or equal to 1 (got 0)",
        f"{file}:3 train.batch: unknown setting; did you mean train.batch_size?",
        f"{file}:4 train.epochs: is written twice, first on line 2; keep one",
        f"{file}:5 optim.lr: must be greater than 0 (got -1)",
        f"{file}:6 optim: is written twice, first on line 5; keep one",
        "optim.args.betas.0: must be less than 1 (got 1)",
        "train.seed: must be greater than or equal to 0 (got -1)",
        "sed: unknown setting; did you mean train.seed?",
    )


def test_a_consequence_of_another_mistake_is_not_told(tmp_path: Path) -> None:
    # data.path "has no meaning" only because the source was not understood
    file = tmp_path / "config.yaml"
    file.write_text("data: {sorce: csv, path: x.csv}")
    assert len(_said(str(file))) == 1
    assert len(_said(str(tmp_path / "missing.yaml"), {"data.path": "x.csv"})) == 1
    assert len(_said(str(tmp_path / "missing.yaml"), {"sed": "1", "train.seed": "{"})) == 3


def test_nested_and_dotted_names_mean_the_same_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "\ufeffoptim: {lr: 1e-3, name: sgd}\ndata: {}\nrun.name: on\nmodel.args.hidden: [8]\n"
        "model: {args.dropout: 0.5}\ntrain:\n  seed: 0x10\n  epochs: 010\n  compile: off\n"
    )
    config = resolve_config(
        str(file), {"optim.lr": "2", "model.args.hidden": "[4]", "run.experiment": "7"}
    )
    assert (config.optim.lr, config.optim.name, config.run.name) == (2, "sgd", "on")
    assert config.model.args == {"dropout": 0.5, "hidden": [4]}
    assert (config.train.seed, config.train.epochs, config.train.compile) == (16, 10, "off")


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("optim.lr", "1e-3", 0.001),
        ("optim.lr", " .5 ", 0.5),
        ("optim.lr", ".5e-3", 0.0005),
        ("optim.clip_norm", "None", None),
        ("optim.clip_norm", "1", 1.0),
        ("run.name", "123", "123"),
        ("run.name", "null", None),
        ("data.cache", "true", "true"),
        ("data.cache", "null", "null"),
        ("data.scale", "False", False),
        ("model.args", '{"hidden": [64], "dropout": 0.1}', {"hidden": [64], "dropout": 0.1}),
        ("model.args", "{hidden: [64]}", {"hidden": [64]}),
        ("model.args.activation", "relu", {"activation": "relu"}),
        ("model.args", {"a": 1}, {"a": 1}),
        ("train.epochs", 3, 3),
    ],
)
def test_a_flag_is_read_by_the_kind_of_its_setting(name: str, text: Any, value: Any) -> None:
    flat = resolve_config(None, {"model.name": "mine:Net", name: text}).flat()
    assert flat["model.args" if name.startswith("model.args") else name] == value


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("optim.lr", "-0.1", "optim.lr: must be greater than 0 (got -0.1)"),
        ("optim.lr", "nan", "optim.lr: must be a valid number (got 'nan')"),
        ("optim.lr", ".nan", "optim.lr: must be a finite number (got nan)"),
        ("optim.lr", "", "optim.lr: must be a valid number (got '')"),
        ("optim.lr", "null", "optim.lr: must be a valid number (got null)"),
        (
            "optim.lr",
            "\udcff",
            "optim.lr: is not YAML: special characters are not allowed (got '\\udcff')",
        ),
        ("optim.clip_norm", "x", "optim.clip_norm: must be a valid number (got 'x')"),
        ("optim.clip_norm", "0", "optim.clip_norm: must be greater than 0 (got 0)"),
        ("train.epochs", "true", "train.epochs: must be a valid integer (got true)"),
        ("train.epochs", "2.0", "train.epochs: must be a valid integer (got 2.0)"),
        ("data.scale", "1", "data.scale: must be a valid boolean (got 1)"),
        ("run.name", "a\nb", "run.name: must be printable text on one line (got 'a\\nb')"),
        (
            "data.cache",
            "\udcff",
            "data.cache: must be a valid string, unable to parse raw data as a unicode string (got",
        ),
        ("model.args", "[1]", "model.args: must be a valid dictionary (got [1])"),
        (
            "model.args",
            "{a: 1, a: 2}",
            "model.args: a: is written twice, first on line 1; keep one",
        ),
        ("model.args", "{a", "model.args: is not YAML: while parsing a flow mapping expected"),
        ("model.args.x", "*a", "model.args.x: is not YAML: found undefined alias 'a' (got '*a')"),
        (
            "model.args.x",
            "[" * 2000,
            "model.args.x: is not YAML: maximum recursion depth exceeded (got '[[[",
        ),
        (
            "model.args",
            "\udcff",
            "model.args: is not YAML: special characters are not allowed",
        ),
        ("optim", "3", "optim: is a section; give its settings by name, such as optim.name"),
        ("a\nb\x1b[0m", "3", "a\\nb\\x1b[0m: unknown setting; the sections are device, data,"),
        ("", "3", ": unknown setting; the sections are device, data,"),
        ("x" * 10**6, "3", "xxxx"),
    ],
)
def test_a_wrong_flag_is_told_under_its_dotted_name(name: str, text: str, said: str) -> None:
    problems = _said(None, {name: text})
    assert len(problems) == 1 and problems[0].startswith(said) and len(problems[0]) < 2200


@pytest.mark.parametrize(
    "wrong, meant",
    [
        ("learning_rate", "optim.lr"),
        ("lr", "optim.lr"),
        ("optm.lr", "optim.lr"),
        ("optim.weight_dacay", "optim.weight_decay"),
        ("optim.batch_size", "train.batch_size"),
        ("train.batch-size", "train.batch_size"),
        ("trian.epochs", "train.epochs"),
        ("epocs", "train.epochs"),
        ("batch", "train.batch_size"),
        ("gpu", "device.name"),
        ("amp", "train.precision"),
        ("optm.name", "optim.name"),
        ("data.name", "data.source"),
        ("modle.name", "model.name"),
        ("memory.limit_mb", "memory.limit_mib"),
        ("memory.limit", "memory.limit_mib"),
        ("memory_limit", "memory.limit_mib"),
        ("random_seed", "train.seed"),
        ("warmup_ratio", "optim.warmup"),
        ("num_epochs", "train.epochs"),
        ("optimizer", "optim.name"),
        ("lr_scheduler", "optim.schedule"),
    ],
)
def test_a_typo_or_another_tools_word_leads_to_the_setting(wrong: str, meant: str) -> None:
    assert describe_unknown_setting(wrong) == f"unknown setting; did you mean {meant}?"


def test_every_word_of_another_tool_leads_to_a_setting_that_is_there() -> None:
    from headroom.settings.table import _OTHER_WORDS

    assert set(_OTHER_WORDS) <= set(RunConfig().flat())
    for name, words in _OTHER_WORDS.items():
        assert {describe_unknown_setting(w) for w in words.split()} == {
            f"unknown setting; did you mean {name}?"
        }


def test_a_mapping_and_what_is_set_in_it_go_together_in_any_order_and_form() -> None:
    args = {"hidden": [4], "dropout": 0.5}
    whole, inner = {"hidden": [4], "dropout": 0.1}, 0.5
    for asked in (
        {"model.args.dropout": inner, "model.args": whole},
        {"model": {"args.dropout": inner}, "model.args": whole},
        {"model.args.dropout": inner, "model": {"args": whole}},
        {"model": {"args.dropout": inner, "args": whole}},
    ):
        assert make_config(asked).model.args == args
        assert override_config(RunConfig(), asked).model.args == args
    assert whole["dropout"] == 0.1  # the caller's own dict stays as it was


def test_overrides_change_only_what_they_name() -> None:
    config = resolve_config(None, {"optim.lr": 0.5, "model.args": {"hidden": [4], "dropout": 0.1}})
    changed = override_config(config, {"train.epochs": 3, "model.args.hidden": [8]})
    assert (changed.optim.lr, changed.train.epochs) == (0.5, 3)
    assert changed.model.args == {"hidden": [8], "dropout": 0.1}
    assert override_config(config, None) is config and override_config(config, {}) is config
    nested = override_config(config, {"optim": {"clip_norm": 0.1}, "data": {}})
    assert (nested.optim.lr, nested.optim.clip_norm, nested.data) == (0.5, 0.1, config.data)


@pytest.mark.parametrize(
    "overrides, said",
    [
        ({"optim.lr": "0.1"}, "optim.lr: must be a valid number (got '0.1'); drop the quotes"),
        ({"optim.lr": True}, "optim.lr: must be a valid number (got true)"),
        (
            {"optim.lr": 10**5000},
            "optim.lr: must be a valid number (got a value too long to print)",
        ),
        ({"optim": {"lr": 0}}, "optim.lr: must be greater than 0 (got 0)"),
        (
            {"optim": None},
            "optim: is a section; give its settings by name, such as optim.name (got",
        ),
        ({"optim": {1: 2}}, "optim.1: unknown setting; did you mean optim.lr?"),
        ({"optim.clipnorm": 1}, "optim.clipnorm: unknown setting; did you mean optim.clip_norm?"),
        ({"model.args": {1: 2}}, "model.args.1.[key]: must be a valid string (got 1); put it"),
        ({"data.source": "csv"}, "data.path: is needed for source csv; name the file to read"),
        ({"train.accumulate": 65}, "train.accumulate: must be at most train.batch_size (got 65 "),
        ({1: 2}, "overrides: must be a dict of settings, such as {'optim.lr': 0.01} (got {1: 2})"),
        ([1], "overrides: must be a dict of settings, such as {'optim.lr': 0.01} (got [1])"),
    ],
)
def test_a_wrong_override_is_told_like_a_wrong_flag(overrides: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override_config(RunConfig(), overrides)
    assert len(caught.value.problems) == 1 and str(caught.value).startswith(said)


def test_the_table_lists_every_setting_with_its_text_and_default() -> None:
    rows = {row.name: row for row in list_settings()}
    assert list(rows) == list(RunConfig().flat())
    assert all(row.text for row in rows.values())
    assert rows["optim.lr"][1:4] == ("number", "0.002", "above 0, at most 1,000")
    assert rows["optim.clip_norm"][1:4] == ("number or null", "null", "above 0")
    assert rows["train.keep"][1:4] == ("one of", "best", "best, last")
    assert rows["model.args"][1:4] == ("dictionary", "{}", "")
    assert make_markdown_table().count("\n") == len(rows) + 2
    assert (
        "| `optim.lr` | number | `0.002` | above 0, at most 1,000 | Peak lea"
        in make_markdown_table()
    )


@pytest.mark.parametrize(
    ("path", "source"), [("a.csv", "csv"), ("b.TAB", "tsv"), ("c.pq", "parquet"), ("d.txt", "text")]
)
def test_the_ending_of_a_path_tells_its_source(path: str, source: str) -> None:
    assert resolve_config(None, {"data.path": path}).data.source == source
    assert override_config(RunConfig(), {"data.path": path}).data.source == source


def test_every_default_reads_back_as_a_flag() -> None:
    defaults = {row.name: row.default for row in list_settings() if row.default != "null"}
    assert resolve_config(None, defaults) == RunConfig()


def test_a_problem_survives_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError("a: b", "c: d")))
    assert error.problems == ("a: b", "c: d") and str(error) == "a: b\nc: d"


@pytest.mark.parametrize(
    "text", ["1e-3", "yes", "1_000", "12:30", "0o7", "null", "- a", "2024-01-01"]
)
def test_written_settings_read_back_as_they_were(tmp_path: Path, text: str) -> None:
    config = override_config(
        RunConfig(),
        {"run.name": text, "optim.lr": 1e-7, "model": {"name": "mine:Net", "args.x": [text]}},
    )
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(config.model_dump()))
    assert resolve_config(str(file), {}) == config


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12))
def test_any_text_that_is_written_reads_back_or_is_refused(text: str) -> None:
    try:
        assert parse_value(dump_yaml({"a": text})) == {"a": text}
    except SettingsProblem:
        assert not text.isprintable()


@settings(max_examples=200, deadline=None)
@given(st.from_regex(r"[-+.0-9eExo:infa~]{1,8}", fullmatch=True))
def test_a_bare_word_is_what_yaml_1_2_says(text: str) -> None:
    try:
        value = parse_value(text)
    except SettingsProblem:
        return
    if isinstance(value, list | dict | None):  # "-", ":"
        return
    if isinstance(value, float):
        assert float(text.replace(".inf", "inf").replace(".nan", "nan")) == value or value != value
    elif isinstance(value, int):
        assert int(text, 0 if "x" in text or "o" in text else 10) == value
    else:
        assert value == text


SEED_TEXT = """\
optim: {lr: 1e-3, name: sgd}   # a comment
train:
  epochs: 5
  batch_size: 64
"data": {source: csv, path: 'x'}
model.args: {hidden: [64, 32], act: "re\\u006cu"}
run.name: |
  text
"""
_PIECES = st.one_of(
    st.sampled_from(
        list("{}[],:#&*!|>'\"%@`-?\n\t \\~=.") + ["---\n", "<<: ", "!!int ", "\\x", "..."]
    ),
    st.text(max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SEED_TEXT)), _PIECES, st.integers(0, 9)), max_size=6))
def test_mutated_text_gives_a_config_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, str, int]]
) -> None:
    text = SEED_TEXT
    for place, piece, cut in edits:
        text = text[:place] + piece + text[place + cut :]
    file = tmp_path_factory.getbasetemp() / "mutated.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert isinstance(resolve_config(str(file), {}), RunConfig)
    except ConfigError as error:
        assert error.problems and all(p.isprintable() for p in error.problems)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-3", 0.001), ("off", "off"), ("12:30", "12:30"), ("010", 10), ("1_000", 1000)),
        *(("2024-01-01", "2024-01-01"), ("=", "="), ("<<", "<<")),
    ],
)
def test_words_that_yaml_1_1_read_otherwise(text: str, value: Any) -> None:
    """PyYAML read 1e-3 as text, off as false, 12:30 as 750 and 010 as 8."""
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            {"train": {"patience": 30}},
            "train.patience: has no effect (got 30): the run ends after 20 epochs, by train.epochs",
        ),
        (
            {"data.source": "text", "data.split_seed": 3},
            "data.split_seed: has no effect (got 3): it is not for tokens (data.source is text)",
        ),
    ],
)
def test_a_setting_without_effect_is_told(asked: dict[str, Any], line: str) -> None:
    assert read_settings.describe_unused_settings(make_config(asked)) == [line]


def test_a_setting_without_meaning_is_no_param_of_the_run() -> None:
    params = read_settings.collect_params(make_config({"data.source": "text", "optim.name": "sgd"}))
    assert params["data.path"] is None and params["train.patience"] == 0
    assert not {"data.scale", "data.split"} & set(params)
    assert not read_settings.describe_unused_settings(RunConfig())


def test_arguments_of_a_built_in_model_are_told_with_the_other_mistakes(tmp_path: Path) -> None:
    """They were told once all else was right, and without their line."""
    file = tmp_path / "config.yaml"
    file.write_text("optim: {lr: 0}\nmodel:\n  args: {hidden: 256, droput: 0.1}\n")
    assert _said(str(file)) == (
        f"{file}:1 optim.lr: must be greater than 0 (got 0)",
        f"{file}:3 model.args: hidden must be a list of whole numbers from 1 to 1,048,576, "
        "such as [256] (got 256); 'droput' is unknown; the model mlp takes hidden, dropout; "
        "did you mean dropout?",
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"train": {"epochz": 2}}, "train.epochz: unknown setting; did you mean train.epochs?"),
        ({"optim.lr": "0.1"}, "optim.lr: must be a valid number (got '0.1'); drop the quotes"),
        (
            {"optim": None},
            "optim: is a section; give its settings by name, such as optim.name (got null)",
        ),
        (
            [1],
            "config: must be a dict of settings, such as {'optim.lr': 0.01} (got [1])",
        ),
    ],
)
def test_a_dict_of_a_notebook_is_refused_as_a_file_is(given: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(given)
    assert str(caught.value) == told


def test_params_are_what_was_set_or_decided() -> None:
    """A third of 64 was empty, and run.key and run.name filled MLflow's parallel coordinates."""
    config = RunConfig.model_validate(
        {"run": {"name": "mine", "key": "k"}, "model": {"args": {"dropout": 0.5}}}
    )
    asked = read_settings.collect_params(config)
    params = read_settings.select_params(asked, task="classification")
    assert all(params.values()) and params["model.args.dropout"] == "0.5"
    assert not {"run.name", "run.key", "launch.port", "data.target_transform"} & set(params)
    assert "data.target_transform" in read_settings.select_params(asked, task="regression")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"optim.args.momentum": 0.9},
            "optim.args.momentum: adamw takes betas, eps, and none of this name",
        ),
        (
            {"optim": {"name": "sgd", "args": {"momentun": 0.9}}},
            "optim.args.momentun: sgd takes momentum, nesterov, and none of this name; did you "
            "mean momentum?",
        ),
        (
            {"optim": {"name": "sgd", "args": {"momentum": 1}}},
            "optim.args.momentum: must be less than 1 (got 1)",
        ),
        (
            {"optim": {"name": "RMSprop", "args": {"centered": "yes"}}},
            "optim.args.centered: must be a valid boolean (got 'yes')",
        ),
        (
            {"data": {"source": "csv", "path": "a.csv", "args": {"rows": 5000}}},
            "data.args.rows: csv takes drop, missing, na, decimal, and none of this name",
        ),
        ({"data.args.context": 64}, "data.args.context: digits takes no arguments"),
        ({"optim.args.betas": [0.9]}, "optim.args.betas.1: must be given too (got [0.9])"),
        (
            {"optim.schedule_args.gamma": 0.5},
            "optim.schedule_args.gamma: cosine takes min_lr_fraction, and none of this name",
        ),
        (
            {"train": {"loss": "bce", "loss_args": {"label_smoothing": 0.1}}},
            "train.loss_args.label_smoothing: bce takes no arguments",
        ),
        (
            {"train.loss_args.smoothing": 0.1},
            "train.loss_args.smoothing: cross_entropy takes label_smoothing, class_weights, and "
            "none of this name; did you mean label_smoothing?",
        ),
        (
            {"train.loss_args.label_smoothing": 1},
            "train.loss_args.label_smoothing: must be less than 1 (got 1)",
        ),
        (
            {"optim": {"schedule": "constant", "schedule_args": {"gamma": 0.5}}},
            "optim.schedule_args.gamma: constant takes no arguments",
        ),
    ],
)
def test_an_argument_that_is_unknown_or_unfit_is_refused_with_those_that_are_taken(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(given)
    assert str(caught.value) == told


@pytest.mark.parametrize("name", MOVED)
def test_a_setting_that_moved_is_refused_with_its_new_home(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({name: 1})
    assert str(caught.value) == f"{name}: is no setting any more; give {MOVED[name]}"
    homes = re.findall(r"[a-z]+\.[a-z_.]+[a-z]", MOVED[name])
    assert homes and {*homes} <= {*RunConfig().flat(), *list_arguments()}


@pytest.mark.parametrize(
    ("text", "after_s", "clock"),
    [
        *(("90s", 90, None), ("45min", 2700, None), ("6h", 21600, None), ("1.5d", 129600, None)),
        *(("1h30min", 5400, None), ("06:30", None, "06:30"), ("none", None, None)),
        ("2030-01-31 06:30", None, "2030-01-31 06:30"),
    ],
)
def test_a_training_ends_after_so_long_or_by_the_clock(
    text: str, after_s: float | None, clock: str | None
) -> None:
    train = resolve_config(None, {"train.end": text}).train
    assert (train.end_after_s, train.end_clock) == (after_s, clock)


@pytest.mark.parametrize(
    ("text", "every_s", "every_steps"),
    [("5min", 300, None), ("500steps", None, 500), ("1 step", None, 1), ("none", None, None)],
)
def test_checkpoints_come_by_time_or_by_steps(
    text: str, every_s: float | None, every_steps: int | None
) -> None:
    checkpoint = resolve_config(None, {"checkpoint.every": text}).checkpoint
    assert (checkpoint.every_s, checkpoint.every_steps) == (every_s, every_steps)
    assert checkpoint.is_on == (text != "none")


def test_an_argument_is_a_flag_a_param_and_a_name_to_search_over() -> None:
    config = resolve_config(None, {"optim.name": "sgd", "optim.args.momentum": "0.5"})
    assert config.optim.args == {"momentum": 0.5}
    params = read_settings.select_params(read_settings.collect_params(config))
    assert params["optim.args.momentum"] == "0.5"
    plain = read_settings.select_params(read_settings.collect_params(RunConfig()))
    assert not [name for name in plain if name.startswith("optim.args")]
    assert find_kind("optim.args.momentum") == "number"
    assert find_kind("optim.schedule_args.step_size") == "integer"


def test_where_messages_go_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "https://ntfy.example.org/pq7marker"
    for place in (address, "post-to pq7marker"):
        monkeypatch.delenv("HEADROOM_SECRET_RUN_NOTIFY", raising=False)
        config = RunConfig.model_validate({"run": {"notify": place}})
        hidden = hide_config_secrets(config)
        assert hidden.run.notify == "***"
        assert find_config_secrets(config) == {"run.notify": place}
        assert "run.notify" not in select_params(collect_params(config))
        assert collect_params(config)["run.notify"] == "***"
        with pytest.raises(ConfigError, match=r"run.notify: was hidden .*_SECRET_RUN_NOTIFY in"):
            restore_config_secrets(hidden)
        monkeypatch.setenv("HEADROOM_SECRET_RUN_NOTIFY", place)
        assert restore_config_secrets(hidden) == config


@pytest.mark.parametrize(
    "place", ["ftp://pq7marker/x", "https://", "slack://pq7marker", "'pq7marker", "pq7marker\n", 5]
)
def test_a_place_for_messages_is_refused_without_being_shown(place: Any) -> None:
    with pytest.raises(ConfigError, match="^run.notify: must be ") as refused:
        make_config({"run.notify": place})
    assert "pq7marker" not in str(refused.value) and "got" not in str(refused.value).split(";")[0]


def test_all_wrong_paths_of_the_settings_are_told_at_once(own: Callable[[str, str], None]) -> None:
    own("mine_c", "raise SystemExit('never imported here')\n")
    config = RunConfig.model_validate(
        {
            "model": {"name": "nowhere_c:Net"},
            "data": {"source": "os:listdir"},
            "train": {"loss": "mine_c:loss", "metrics": {"best": "nowhere_c:best"}},
        }
    )
    with pytest.raises(ConfigError) as got:
        check_imports(config)
    starts = [problem.partition(":")[0] for problem in got.value.problems]
    assert starts == ["model.name", "data.source", "train.metrics.best"]


def test_a_word_that_neither_allows_nor_forbids_imports_is_refused_by_every_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ "False" was once read as leave to import."""
    monkeypatch.setenv("HEADROOM_ALLOW_IMPORTS", "flase")
    with pytest.raises(ConfigError, match="^HEADROOM_ALLOW_IMPORTS: must be one of 1, .*'flase'"):
        check_imports(RunConfig())


TORCH_OPTIMIZERS = [name for name in OPTIMIZER_ARGS if name not in FUSED]


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_the_arguments_of_an_optimizer_of_torch_are_its_own_with_its_presets(name: str) -> None:
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    mine = OPTIMIZER_ARGS[name]().model_dump()
    assert mine == {argument: theirs[argument].default for argument in mine}


def test_what_is_given_stays_given_and_presets_fill_the_rest_for_any_optimizer() -> None:
    """A momentum or a weight decay that was given, and was the preset of the optimizer before, was
    lost where an override named another one."""
    first = make_config({"optim.name": "RMSprop"})
    assert (first.optim.args, first.optim.decay) == ({}, 0.0)
    assert override_config(first, {"optim.name": "sgd"}).optim.decay == 0.01
    given = make_config(
        {"optim.name": "sgd", "optim.weight_decay": 0.01, "optim.args.momentum": 0.9}
    )
    other = override_config(given, {"optim.name": "SGD"})
    assert (other.optim.args, other.optim.decay) == ({"momentum": 0.9}, 0.01)
    assert override_config(other, {"optim.lr": 0.1}).optim.args == {"momentum": 0.9}
