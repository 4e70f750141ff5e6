"""Trainings that want the same GPUs at once: each has its own, whatever becomes of the others."""

import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.contention import contend
from headroom.device.detection import detect_best_device
from headroom.device.leases import Leases
from tests.conftest import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# What a training does with its devices, by the doors that it uses, without the rest of it.
TRAINS = """
import sys
import torch
from pathlib import Path
from headroom.device.detection import detect_best_device
from headroom.device.leases import Leases
from witness import Witness
leases = Leases(Path("leases"), wait_s=120, holder="a test")
device = detect_best_device(sys.argv[1], leases=leases, count=int(sys.argv[2]))
names = (device.name, *device.beside)
assert len({*names}) == int(sys.argv[2]) == len(leases.devices)
models = {name: Witness((4,), 2).to(name) for name in names}
for _ in range(int(sys.argv[3])):
    for name, model in models.items():
        model(torch.ones(1, 4, device=name))
leases.close()
"""


def test_no_gpu_is_two_trainings_at_once_though_one_is_killed(tmp_path: Path) -> None:
    wanted = [("cuda", 1, 20), ("cuda", 2, 2), ("cuda:1", 1, 4), ("cuda", 1, 4), ("cuda", 2, 2)]
    commands = [[sys.executable, "-c", TRAINS, *map(str, words)] for words in wanted]
    # A stand-in for GPUs has a folder of its own there.
    path = os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = contend(tmp_path, {**os.environ, "PYTHONPATH": path}, commands, kills=1, within_s=0.5)
    logs = [(tmp_path / f"{n}.log").read_text() for n in range(len(wanted))]
    assert found.find_faults() == []
    assert sorted(found.codes.values()) == [-9, 0, 0, 0, 0], logs
    assert len({one.pid for one in found.computed}) == 5
    assert len({one.device for one in found.computed}) >= 2


def test_a_training_of_two_processes_leases_both_and_of_more_than_there_are_one(
    tmp_path: Path,
) -> None:
    """The second process asked for its own when the first had begun: two such trainings waited for
    each other."""
    here, leases = torch.cuda.device_count(), Leases(tmp_path, wait_s=0, holder="it")
    device = detect_best_device("cuda:1", leases=leases, count=2)
    assert (device.name, device.beside) == ("cuda:1", ("cuda:0",)) and len(leases.devices) == 2
    assert len(detect_best_device("cuda", leases=leases, count=None).beside) == here - 1
    assert detect_best_device("cuda", leases=leases, count=here + 1).beside == ()
    leases.close()
