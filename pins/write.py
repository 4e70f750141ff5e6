"""Writes the files beside it anew, for `make pins`: of each group of packages the version that
constraints.txt pins and the SHA-256 of every file that the index has of it, for all platforms and
for Python 3.11 and newer. What constraints.txt lacks is added to it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

PINS = Path(__file__).resolve().parent
ROOT = PINS.parent
CONSTRAINTS = ROOT / "constraints.txt"
# Of each file the extras of pyproject.toml that it is for. `run` is what all others come beside.
GROUPS = {
    "run": (),
    "dev": ("dev",),
    "team": ("team",),
    "adapters": ("lightning", "transformers", "accelerate"),
    "ui": ("ui",),
    "site": ("site",),
    "mutants": ("mutants",),
}
# What is installed into a folder of its own: see the Makefile.
ULTRALYTICS = (
    *("ultralytics", "ultralytics-thop", "torchvision", "opencv-python-headless"),
    *("polars", "polars-runtime-32"),
)
# What PyTorch's build for CUDA brings, pinned by it.
CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton)")
OLDEST = {"site": "3.11.5"}  # pymdown-extensions wants that
HEAD = "# Written by `make pins`, from constraints.txt and pyproject.toml.\n"


def main() -> None:
    run = _resolve("run")
    _write("torch", {"torch": run["torch"]})
    _write("torch_cpu", {"torch": _list_cpu_builds(run["torch"])})
    _write("cuda", {name: text for name, text in run.items() if CUDA.match(name)})
    known = set(run)
    _write("run", {n: text for n, text in run.items() if n != "torch" and not CUDA.match(n)})
    pinned = dict(run)
    for group in list(GROUPS)[1:]:
        found = _resolve(group)
        pinned |= found
        _write(group, {name: text for name, text in found.items() if name not in known})
    alone = _compile(["--no-deps", "-"], "\n".join(ULTRALYTICS))
    _write("ultralytics", alone)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = _compile(["-"], "\n".join(extras["optional-dependencies"]["supply"]))
    _write("supply", tools)  # it has an environment of its own
    _add_to_constraints(pinned | alone | tools)


def _resolve(group: str) -> dict[str, str]:
    extras = [word for extra in GROUPS[group] for word in ("--extra", extra)]
    oldest = OLDEST.get(group, "3.11")
    return _compile([*extras, str(ROOT / "pyproject.toml")], oldest=oldest)


def _compile(words: list[str], given: str | None = None, *, oldest: str = "3.11") -> dict[str, str]:
    """Return of each package its line with its hashes."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--no-config"]
    command += [
        "--python-version",
        oldest,
        "--default-index",
        "https://pypi.org/simple",
        "--constraint",
        str(CONSTRAINTS),
    ]
    done = subprocess.run(
        [*command, *words], cwd=ROOT, input=given, check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, str] = {}
    for entry in re.findall(r"(?m)^\S.*(?:\n .*)*\n", done.stdout):
        name = re.split("[=;[ ]", entry, maxsplit=1)[0]
        found[name] = found.get(name, "") + entry  # several where platforms differ
    return found


def _list_cpu_builds(entry: str) -> str:
    """Return the line of PyTorch's CPU builds of the version of this entry. They lie in PyTorch's
    own index, of which torch_cpu.sha256 is a part."""
    version = re.findall(r"==([\w.]+)", entry)[0]
    lines = (PINS / "torch_cpu.sha256").read_text().splitlines()
    hashes = [line.split()[0] for line in lines if f"torch-{version}+cpu-" in line]
    if not hashes:
        sys.exit(f"pins/torch_cpu.sha256 has no CPU build of torch {version}: its index lists them")
    return " \\\n    --hash=sha256:".join([f"torch=={version}+cpu", *hashes]) + "\n"


def _write(group: str, entries: dict[str, str]) -> None:
    (PINS / f"{group}.txt").write_text(HEAD + "".join(entries[name] for name in sorted(entries)))


def _add_to_constraints(entries: dict[str, str]) -> None:
    head, *lines = CONSTRAINTS.read_text().splitlines()
    known = {_normalize(line.split("==")[0]) for line in lines}
    new = {name: text for name, text in entries.items() if name not in known}
    versions = {name: re.split(r"[ ;\\]", text, maxsplit=1)[0] for name, text in new.items()}
    lines += [line for name, line in versions.items() if not CUDA.match(name)]
    lines.sort(key=lambda line: line.partition("==")[0].lower())
    CONSTRAINTS.write_text("\n".join([head, *lines]) + "\n")


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
