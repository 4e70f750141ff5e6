"""Installs what the files beside it pin into the environment of the Python that runs it, for `make
setup` and the image: `python pins/install.py run dev`. Each file is compared with its SHA-256
before anything of it runs, and none is built here. A PyTorch that is there already stays."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from itertools import takewhile
from pathlib import Path

PINS = Path(__file__).resolve().parent
PIP = (sys.executable, "-m", "pip", "--quiet")
CHECKED = ("--no-deps", "--require-hashes", "--only-binary", ":all:")


def main() -> None:
    words = sys.argv[1:]
    groups = list(takewhile(lambda word: not word.startswith("-"), words))
    of_pip = words[len(groups) :]
    if not groups or not all((PINS / f"{group}.txt").is_file() for group in groups):
        known = ", ".join(sorted(file.stem for file in PINS.glob("*.txt")))
        sys.exit(f"usage: python pins/install.py GROUP... [OPTION OF PIP]...; groups: {known}")
    if "run" in groups:
        _install_torch()
    _install(*CHECKED, *of_pip, *_name_files(groups))
    if "run" in groups:
        # Its build runs what is installed by now, not what an index gives for the moment.
        local = ("--no-deps", "--no-index", "--no-build-isolation", "--editable")
        _install(*local, str(PINS.parent))
    if not of_pip:
        _call_pip("check")


def _install_torch() -> None:
    """Install PyTorch: its CPU build where the index that pip is told of has that, as PyPI has not
    for Linux; else PyPI's, and what its build for CUDA needs. One that is here was chosen by its
    user: a build for ROCm, XPU or another CUDA, of which no hash is in the lists."""
    try:
        print(f"PyTorch {distribution('torch').version} is here and stays as it is")
        return
    except PackageNotFoundError:
        pass
    command = [*PIP, "install", *CHECKED, *_name_files(["torch_cpu"])]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if not done.returncode:
        return
    # The second is what pip says where constraints of its user name PyTorch too.
    absent = ("No matching distribution", "ResolutionImpossible")
    if not any(words in done.stderr for words in absent):
        sys.exit(done.stderr)
    _install(*CHECKED, *_name_files(["torch"]))
    if any(need.startswith("nvidia-") for need in distribution("torch").requires or ()):
        _install(*CHECKED, *_name_files(["cuda"]))


def _name_files(groups: list[str]) -> list[str]:
    return [word for group in groups for word in ("--requirement", str(PINS / f"{group}.txt"))]


def _install(*words: str) -> None:
    _call_pip("install", *words)


def _call_pip(command: str, *words: str) -> None:
    done = subprocess.run([*PIP, command, *words])
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
