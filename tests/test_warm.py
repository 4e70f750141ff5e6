"""The processes that the tests' commands are forked from (tests/warm)."""

import os
import subprocess
import sys
import time

import pytest

WARM = {**os.environ, "TESTS_WARM_KIND": "mlflow"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyTorch must not fork")
def test_a_command_that_is_killed_at_once_leaves_the_others_alone() -> None:
    """It took the process along that all are forked from, and with it the exit code of others."""
    code = "import os, time; time.sleep(1); print(os.getppid())"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=WARM, stdout=subprocess.PIPE, text=True
    ) as other:
        for tenth in range(20):
            with subprocess.Popen([sys.executable, "-c", "pass"], env=WARM) as killed:
                time.sleep(tenth / 400)
                killed.kill()
        told, _ = other.communicate(timeout=60)
    assert other.returncode == 0
    again = subprocess.run(
        [sys.executable, "-c", code], env=WARM, capture_output=True, text=True, timeout=60
    )
    assert again.stdout == told, "another process had to be started"
