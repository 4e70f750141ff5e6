"""Code of a user's own is found as `python -m` finds it; every way that fails is one sentence."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headroom.base.import_paths import (
    bind_arguments,
    call_factory,
    find_import_problem,
    import_callable,
    is_installed,
)

ROOT = Path(__file__).parent.parent.parent
Own = Callable[[str, str], None]


class Refused(ValueError):
    pass


def _found(path: str) -> Callable:
    return import_callable(path, setting="model.name", refusal=Refused)


def _refused(path: str) -> str:
    with pytest.raises(Refused) as got:
        _found(path)
    text = str(got.value)
    assert text.startswith("model.name: ") and "\n" not in text
    return text


def test_a_module_is_found_from_the_working_directory(own: Own) -> None:
    own("mine_a", "class Net:\n    @staticmethod\n    def make():\n        return 5\n")
    own("pack_a.inner.deep", "def f():\n    return 7\n")
    assert _found("mine_a:Net.make")() == 5
    assert _found("pack_a.inner.deep:f")() == 7


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("os:system", "os is Python's own"),
        ("builtins:eval", "builtins is Python's own"),
        ("os.path:join", "os is Python's own"),
        ("headroom.models.builtin:mlp", "headroom is this project's"),
        ("flows.train:train", "flows is this project's"),
        ("nowhere_b:f", "there is no module nowhere_b"),
        ("mine_b.inner:f", "there is no module mine_b.inner"),
        ("numpy.nowhere_b:f", "there is no module numpy.nowhere_b"),
    ],
)
def test_what_the_settings_alone_show_is_refused_and_nothing_is_run(
    own: Own, path: str, words: str
) -> None:
    own("mine_b", "open('ran', 'w').close()\n")
    assert words in (find_import_problem("model.name", path) or "")
    assert words in _refused(path)
    assert not os.path.exists("ran")


@pytest.mark.parametrize("word", ["0", "false", "FALSE", "no", "off", ""])
def test_a_deployment_can_forbid_every_import_path(
    own: Own, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    own("mine_d", "open('ran', 'w').close()\ndef f(): ...\n")
    monkeypatch.setenv("HEADROOM_ALLOW_IMPORTS", word)
    assert f"forbidden here by HEADROOM_ALLOW_IMPORTS={word} (got mine_d:f)" in _refused("mine_d:f")
    assert not os.path.exists("ran")
    monkeypatch.setenv("HEADROOM_ALLOW_IMPORTS", "yes")
    assert _found("mine_d:f")


@pytest.mark.parametrize(
    ("source", "path", "words"),
    [
        ("x = 1\n", "mine:Net", "mine has no Net (got mine:Net); define it there"),
        ("class Net: ...\n", "mine:Nett", "did you mean Net?"),
        ("Net = 3\n", "mine:Net", "must be a class or a function (got a int)"),
        ("import os\n", "mine:os.system", "goes through another module"),
        ("from os import system\n", "mine:system", "is Python's own"),
        ("\n1 / 0\n", "mine:f", "imported: mine.py:2: ZeroDivisionError: division by zero"),
        ("import nowhere_e\n", "mine:f", "mine.py:1: ModuleNotFoundError"),
        ("def f(:\n", "mine:f", "mine.py:1: SyntaxError"),
        ("\nimport sys\nsys.exit(3)\n", "mine:f", "mine.py:3: it exits with 3"),
        ("raise SystemExit\n", "mine:f", "mine.py:1: it exits with None"),
    ],
)
def test_an_import_that_fails_is_told_by_file_and_line(
    own: Own, source: str, path: str, words: str
) -> None:
    own("mine", source)
    assert words in _refused(path)


def test_what_an_import_prints_does_not_mix_with_the_output(
    own: Own, capsys: pytest.CaptureFixture[str]
) -> None:
    own("mine", "print('hello from the import')\ndef f(): print('hello from f'); return 1\n")
    made = call_factory(_found("mine:f"), {}, setting="model.name", path="mine:f", refusal=Refused)
    out, err = capsys.readouterr()
    assert made == 1 and out == "" and err == "hello from the import\nhello from f\n"


def test_an_exit_that_a_signal_asked_for_is_no_mistake_of_the_user(own: Own) -> None:
    """Told apart by its class, which a handler of this project raises."""
    own("mine", "import signal, os\ndef f():\n    os.kill(os.getpid(), signal.SIGTERM)\n")
    code = (
        "from headroom.process import signals\nsignals.install_signal_handlers()\n"
        "signals.enable_signal_exceptions()\n"
        "from headroom.base.import_paths import import_callable\n"
        "from headroom.base.import_paths import call_factory\n"
        "f = import_callable('mine:f', setting='a.b', refusal=ValueError)\n"
        "call_factory(f, {}, setting='a.b', path='mine:f', refusal=ValueError)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 143


def _takes(size: int, *, depth: int = 2, outputs: int = 0) -> None: ...


def _takes_any(size: int, **rest: int) -> None: ...


def _by_position(size: int, /) -> None: ...


def test_what_is_offered_goes_to_the_parameters_of_these_names_only() -> None:
    def given(factory: Callable, args: dict) -> dict:
        offered = {"outputs": 3, "seed": 4}
        return bind_arguments(factory, args, offered, setting="model.args", refusal=Refused)

    assert given(_takes, {"size": 1}) == {"size": 1, "outputs": 3}
    assert given(_takes, {"size": 1, "outputs": 9}) == {"size": 1, "outputs": 9}, "asked for wins"
    assert given(_takes_any, {"size": 1, "other": 2}) == {"size": 1, "other": 2}


@pytest.mark.parametrize(
    ("factory", "args", "words"),
    [
        (_takes, {}, "'size' is missing; _takes takes size, depth, outputs"),
        (_takes, {"size": 1, "dept": 2}, "'dept' is unknown; did you mean depth?"),
        (_takes, {"size": 1, "zzz": 2}, "'zzz' is unknown; _takes takes size, depth, outputs"),
        (_by_position, {"size": 1}, "_by_position"),
    ],
)
def test_arguments_that_do_not_fit_are_told_by_name(
    factory: Callable, args: dict, words: str
) -> None:
    with pytest.raises(Refused, match=rf"^model.args: .*{words[:40]}"):
        bind_arguments(factory, args, {}, setting="model.args", refusal=Refused)


def test_the_desk_answers_before_anything_slow_is_imported(own: Own, tmp_path: Path) -> None:
    (tmp_path / "mlflow.yaml").write_text((ROOT / "mlflow.yaml").read_text())
    code = (
        "import sys\nfrom flows.cli.train_command import main\n"
        "assert main(['--model.name', 'nowhere:Net', '--data.source', 'builtins:eval']) == 2\n"
        "print(sorted({'torch', 'prefect', 'mlflow', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith("[]"), done.stdout
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        "model.name",
        "data.source",
    ]


def test_code_of_a_package_is_no_users_code_wherever_it_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that came with the machine, not with this environment, was taken for the user's: all
    of it was copied beside each logged model, and sentences named lines of it."""
    for place in ("lib/python3/dist-packages", ".local/lib/site-packages", "filled/a-1.dist-info"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "mine" / "a-1.dist-info").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    for place in ("filled", "mine"):
        monkeypatch.syspath_prepend(tmp_path / place)
    for place in ("lib/python3/dist-packages", ".local/lib/site-packages", "filled"):
        assert is_installed(str(tmp_path / place / "torch" / "nn.py"))
    assert is_installed(os.__file__) and is_installed(torch.__file__)
    for place in ("mine", "mine/net", "mine/.venv"):
        assert not is_installed(str(tmp_path / place / "net.py"))
