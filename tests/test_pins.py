"""What is installed is pinned, and compared with its hash before it runs; the lists of it are
CycloneDX; advisories of it are read, or it is told that they could not be."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from threading import Thread

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pins import advisories, sbom
from tests.conftest import PYTHON, ROOT

PINS = ROOT / "pins"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENTRY = re.compile(r"(?m)^([\w.-]+)==([^\s;\\]+)(?: ; [^\\\n]+)? \\\n((?:    --hash=.*\n)+)")


def _read(group: str) -> dict[str, tuple[str, int]]:
    """Of each package in the file of a group its version, and how many files it may be."""
    found = ENTRY.findall((PINS / f"{group}.txt").read_text())
    return {name: (version, hashes.count("sha256:")) for name, version, hashes in found}


GROUPS = sorted(file.stem for file in PINS.glob("*.txt") if file.stem != "accepted")


@pytest.mark.parametrize("group", GROUPS)
def test_every_pin_has_hashes_and_is_the_one_of_the_constraints(group: str) -> None:
    text = (PINS / f"{group}.txt").read_text()
    assert len(re.findall(r"(?m)^[^#\s]", text)) == len(ENTRY.findall(text)) > 0
    pins = dict(advisories.read_pins((ROOT / "constraints.txt").read_text()))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for name, (version, files) in _read(group).items():
        assert files > 0
        if group != "cuda":  # PyTorch pins what its build for CUDA brings
            assert version.removesuffix("+cpu") == versions[name], name


def _close(needs: list[Requirement]) -> Iterator[tuple[str, str]]:
    """Yield what these need in this environment, and what that needs."""
    seen, waiting = set(), list(needs)
    while waiting:
        need = waiting.pop()
        key = (canonicalize_name(need.name), *sorted(need.extras))
        if key in seen or need.name == "headroom":
            continue
        seen.add(key)
        try:
            found = distribution(need.name)
        except PackageNotFoundError:
            continue
        yield canonicalize_name(need.name), found.version
        for line in found.requires or ():
            more = Requirement(line)
            extras = ["", *need.extras]
            if not more.marker or any(more.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(more)


@pytest.mark.parametrize(
    ("group", "extras"),
    [
        ("run", ()),
        ("dev", ("dev", "search")),
        ("team", ("team",)),
        ("adapters", ("lightning", "transformers", "accelerate")),
        ("site", ("site",)),
        ("ui", ("ui",)),
        ("mutants", ("mutants",)),
    ],
)
def test_what_is_needed_here_is_pinned(group: str, extras: tuple[str, ...]) -> None:
    """They are installed without what they need: a package that a list lacks would be missed."""
    lines = [*PROJECT["dependencies"]]
    lines += [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    pinned = _read("run") | _read(group) | _read("torch") | _read("cuda")
    for name, version in _close([Requirement(line) for line in lines]):
        assert name in pinned, f"`make pins`: {group} lacks {name} {version}"


def _make_wheel(folder: Path, name: str) -> str:
    """Write a wheel and return its hash."""
    file = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("harm", ["", "its file", "its need"])
def test_a_file_with_another_hash_is_not_installed(tmp_path: Path, harm: str) -> None:
    (tmp_path / "pins").mkdir()
    install = tmp_path / "pins" / "install.py"
    install.write_text((PINS / "install.py").read_text())
    line = f"one==1.0 --hash=sha256:{_make_wheel(tmp_path, 'one')}\n"
    if harm == "its file":
        with (tmp_path / "one-1.0-py3-none-any.whl").open("ab") as file:
            file.write(b"\0")
    (tmp_path / "pins" / "ui.txt").write_text(line if harm != "its need" else "one==1.0\n")
    place = tmp_path / "place"
    words = ["--no-index", "--find-links", str(tmp_path), "--target", str(place)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    command = [PYTHON, str(install), "ui", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode == 0) is (not harm), done.stderr
    assert (place / "one.py").exists() is (not harm)
    if harm:
        assert "hash" in done.stderr.lower()


def test_an_unknown_group_gets_the_list_of_them() -> None:
    command = [PYTHON, str(PINS / "install.py"), "runn"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "run" in done.stderr and "torch" in done.stderr


class _Index(BaseHTTPRequestHandler):
    """An index that knows one pin, with an advisory, and answers nonsense of another."""

    def do_GET(self) -> None:
        name = self.path.split("/")[2]
        one = {"id": "GHSA-1", "aliases": ["CVE-1"], "fixed_in": ["2.0"], "withdrawn": None}
        old = {**one, "id": "GHSA-2", "withdrawn": "2026-01-01"}
        none = {**one, "id": "GHSA-3", "aliases": [], "fixed_in": []}
        answers = {
            "one": {"info": {"version": "1.0"}, "vulnerabilities": [one, old, none]},
            "newer": {"info": {"version": "3.0"}, "vulnerabilities": [one]},
            "broken": [],
        }
        self.send_response(200 if name in answers else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answers.get(name)).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Index) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: str, pins: str, accepted: str = ""
) -> int:
    (tmp_path / "constraints.txt").write_text(pins)
    (tmp_path / "accepted.txt").write_text(accepted)
    monkeypatch.setattr(advisories, "ROOT", tmp_path)
    monkeypatch.setattr(advisories, "ACCEPTED", tmp_path / "accepted.txt")
    monkeypatch.setenv("HEADROOM_ADVISORIES", index)
    return advisories.main()


@pytest.mark.parametrize(
    ("accepted", "code"),
    [("", 1), ("CVE-1 2999-01-01 not called here\n", 0), ("CVE-1 2020-01-01 not called here\n", 1)],
)
def test_an_advisory_with_a_mended_version_fails_unless_it_is_accepted_for_now(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    index: str,
    accepted: str,
    code: int,
) -> None:
    assert _ask(monkeypatch, tmp_path, index, "one==1.0\n", accepted) == code
    said = capsys.readouterr().out
    assert "one==1.0: GHSA-1, mended in 2.0" in said and "GHSA-2" not in said
    assert ("accepted" in said) is (code == 0)
    assert "GHSA-3, mended in no version, for which there is none yet" in said


def test_what_cannot_be_asked_is_told_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], index: str
) -> None:
    pins = "newer==1.0\nbroken==1.0\nunknown==1.0\n"
    assert _ask(monkeypatch, tmp_path, index, pins) == 0
    said = capsys.readouterr().out
    assert "0 of 3 pins" in said and said.rstrip().endswith("newer, broken, unknown")
    assert _ask(monkeypatch, tmp_path, "http://127.0.0.1:1", pins) == 0
    assert "0 of 3 pins" in capsys.readouterr().out


def test_an_acceptance_needs_a_day_and_a_reason() -> None:
    with pytest.raises(SystemExit, match="no name, day and reason"):
        advisories.read_accepted("CVE-1 2026-01-01\n", date(2026, 1, 1))


def test_the_list_of_a_wheel_lies_in_it_where_readers_look(tmp_path: Path) -> None:
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "one", "bom-ref": "root"}},
        "components": [
            {"type": "library", "name": name, "version": "1", "bom-ref": name}
            for name in ("Needed_one", "deep", "tests_it")
        ],
        "dependencies": [
            {"ref": "root", "dependsOn": ["Needed_one", "tests_it"]},
            {"ref": "Needed_one", "dependsOn": ["deep"]},
        ],
    }
    assert {"mlflow", "prefect", "torch"} <= sbom.read_needs() and "pytest" not in sbom.read_needs()
    kept = sbom.keep_needed(bill, {"needed-one", "deep"})
    assert [one["dependsOn"] for one in kept["dependencies"]] == [["Needed_one"], ["deep"]]
    assert [one["name"] for one in kept["components"]] == ["Needed_one", "deep"]
    _make_wheel(tmp_path, "one")
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    (tmp_path / "one.json").write_text(json.dumps(kept))
    sbom.put_into_wheel(wheel, tmp_path / "one.json")
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read("one-1.0.dist-info/sboms/headroom.cdx.json")
        assert json.loads(content)["specVersion"] == "1.6"
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        assert digest in archive.read("one-1.0.dist-info/RECORD").decode()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-index",
            "--target",
            str(tmp_path / "t"),
            wheel,
        ]
    )
    assert done.returncode == 0
