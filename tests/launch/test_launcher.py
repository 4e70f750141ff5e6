"""What a launcher sets, and how a launched process is known."""

from dataclasses import replace

import pytest

from headroom.device.detection import DeviceError, detect_best_device
from headroom.launch import launcher, placement
from headroom.ranks.ranks import read_ranks_from_environment
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig

SET = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host1", "MASTER_PORT": "29400"}
NAMES = (*SET, "PET_NNODES", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in SET.items():
        monkeypatch.setenv(name, value)


def test_the_rank_is_what_a_launcher_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.read_rank() == 1
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert launcher.read_rank() == 0 and not launcher.is_launched()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launcher.read_rank() == 0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "one", r"RANK: must be a whole number .*got 'one'"),
        ("RANK", "2", r"RANK: must be below WORLD_SIZE, 2 \(got 2\)"),
        ("WORLD_SIZE", None, r"WORLD_SIZE: must be a whole number .*it is not set"),
        ("LOCAL_RANK", "x", r"LOCAL_RANK: must be a whole number \(got 'x'\)"),
        ("MASTER_ADDR", None, r"MASTER_ADDR: is not set, while RANK and WORLD_SIZE are"),
        ("MASTER_PORT", "http", r"MASTER_PORT: must be a port, 1 to 65535 \(got 'http'\)"),
        ("MASTER_PORT", "0", r"MASTER_PORT: must be a port, 1 to 65535 \(got '0'\)"),
        ("MASTER_PORT", "99999", r"MASTER_PORT: must be a port, 1 to 65535 \(got '99999'\)"),
        ("RANK", None, "RANK: is not set, while WORLD_SIZE is 2; set it to the number of"),
    ],
)
def test_what_a_launcher_must_set_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, words: str
) -> None:
    """Each was found by PyTorch, minutes later, in words of its own; without RANK each trained
    alone, as often as there were processes."""
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{words}"):
        launcher.read_rank()


@pytest.mark.parametrize(("nodes", "is_refused"), [("4", True), ("1:4", True), ("1", False)])
def test_a_pod_of_several_is_not_taken_for_one_alone(
    monkeypatch: pytest.MonkeyPatch, nodes: str, is_refused: bool
) -> None:
    """Kubeflow's TrainJob sets what torchrun reads, and no RANK: without torchrun each pod trained
    the whole model alone."""
    monkeypatch.setenv("PET_NNODES", nodes)
    assert launcher.read_rank() == 1  # a process of torchrun has them too
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    if is_refused:
        with pytest.raises(ConfigError, match="^RANK: is not set, while PET_NNODES is 4; start by"):
            launcher.read_rank()
    else:
        assert launcher.read_rank() == 0


@pytest.mark.parametrize(("visible", "name"), [(1, "cuda:0"), (2, None)])
def test_without_a_number_on_its_host_a_process_takes_the_only_device_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, name: str | None
) -> None:
    """A pod with one GPU asked for cuda:1."""
    gpu = replace(detect_best_device("cpu"), name="cuda:0", kind="cuda", index=0)
    monkeypatch.setattr(placement.torch.accelerator, "device_count", lambda: visible)
    monkeypatch.setattr(placement, "detect_best_device", lambda *_, **__: gpu)
    ranks = read_ranks_from_environment()
    if name is None:
        with pytest.raises((DeviceError, ConfigError), match="^LOCAL_RANK: is not set, while RANK"):
            placement.choose_device_name(
                RunConfig.model_validate({"device": {"name": "cuda"}}).device, ranks
            )
    else:
        assert (
            placement.choose_device_name(
                RunConfig.model_validate({"device": {"name": "cuda"}}).device, ranks
            )
            == name
        )
