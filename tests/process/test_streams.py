"""Whatever becomes of the standard streams, a command does its work and tells it by its code."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import desk_environment


@pytest.mark.parametrize(
    ("shell", "code", "out"),
    [
        (">&-", 0, ""),
        (">&- 2>&- <&-", 0, ""),
        ("> /dev/full", 0, ""),
        ("--optim.lr bad 2> /dev/full", 2, ""),
        ("--optim.lr bad 2>&-", 2, ""),
        ("| head -1; exit ${PIPESTATUS[0]}", 0, "device:\n"),
    ],
)
def test_streams_that_are_closed_full_or_gone_change_no_exit_code(
    place: Path, shell: str, code: int, out: str
) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m flows.train --dry-run {shell}"],
        cwd=place,
        env=desk_environment(place),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, out, "")
    assert sorted(f.name for f in place.iterdir()) == ["mlflow.yaml"]
