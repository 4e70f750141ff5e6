"""Each failure has its class, and only those that a new process cures are begun again."""

import errno
import os
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from headroom.data.source_data import DataError
from headroom.device.detection import DeviceError, TemporaryDeviceError
from headroom.ranks.ranks import LostProcess, LostRank
from headroom.run.failures import Failure, classify_failure
from headroom.settings.model_args import ModelError
from headroom.settings.read_settings import ConfigError
from headroom.tracking.journal import JournalError, SenderEnded
from headroom.tracking.tracking_settings import TrackingError
from headroom.training.checkpoints import NoRoom
from headroom.watch.oom_report import OutOfMemory
from headroom.watch.step_metrics import Diverged
from tests.ranks import peer_errors

MIB = 1024**2


def _cuda(said: str) -> RuntimeError:
    """As PyTorch 2.13 puts it."""
    return torch.AcceleratorError(
        f"CUDA error: {said}\nSearch for `cudaError' in https://docs.nvidia.com/cuda/ for more "
        "information.\nCUDA kernel errors might be asynchronously reported at some other API call, "
        "so the stacktrace below might be incorrect.\nFor debugging consider passing "
        "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side "
        "assertions.\n"
    )


def _out_of_memory(*, is_held_by_others: bool) -> OutOfMemory:
    explanation: Any = SimpleNamespace(
        sentence="model.args: memory ran out on cuda:0 in the forward pass of step 7",
        message=SimpleNamespace(is_held_by_others=is_held_by_others),
    )
    return OutOfMemory(explanation)


def _caught(error: BaseException, cause: BaseException) -> BaseException:
    try:
        try:
            raise cause
        except BaseException:
            raise error from None
    except BaseException as caught:
        return caught


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
CASES = {
    "illegal access": (_cuda("an illegal memory access was encountered"), "device_lost", "always"),
    "launch": (_cuda("unspecified launch failure"), "device_lost", "always"),
    "ecc": (_cuda("uncorrectable ECC error encountered"), "device_lost", "always"),
    "misaligned": (_cuda("misaligned address"), "device_lost", "always"),
    "unknown": (_cuda("unknown error"), "device_lost", "always"),
    "busy": (_cuda("CUDA-capable device(s) is/are busy or unavailable"), "device_lost", "always"),
    "bus": (RuntimeError("Unable to query: GPU has fallen off the bus"), "device_lost", "always"),
    "driver": (RuntimeError("Triton: CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "device_lost", "always"),
    "cublas": (
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(`"),
        "device_lost",
        "always",
    ),
    "in a user's words": (
        _caught(ValueError("my step failed"), _cuda("unspecified launch failure")),
        "device_lost",
        "always",
    ),
    "a process": (LostProcess("rank 1 was ended by SIGKILL"), "process_lost", "never"),
    "a peer": (LostRank("a peer is gone: Connection reset by peer"), "process_lost", "never"),
    "assert": (_cuda("device-side assert triggered"), "user_code", "never"),
    "no kernel": (_cuda("no kernel image is available for execution"), "user_code", "never"),
    "resources": (RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"), "user_code", "never"),
    "not a device": (ValueError("unspecified launch failure"), "user_code", "never"),
    "ours": (_out_of_memory(is_held_by_others=False), "out_of_memory", "never"),
    "theirs": (_out_of_memory(is_held_by_others=True), "out_of_memory", "always"),
    "raw": (torch.OutOfMemoryError("CUDA out of memory."), "out_of_memory", "never"),
    "host": (MemoryError(), "out_of_memory", "never"),
    "admission": (
        TemporaryDeviceError("device.name: 3 MiB free", kind="out_of_memory"),
        "out_of_memory",
        "",
    ),
    "full": (_caught(JournalError("runs: can't be written"), FULL), "disk_full", "never"),
    "no room for a checkpoint": (NoRoom("checkpoint.every: 2 GiB"), "disk_full", "never"),
    "quota": (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "disk_full", "never"),
    "rust": (
        RuntimeError('IoError(Os { message: "No space left on device" })'),
        "disk_full",
        "never",
    ),
    "mlflow": (TrackingError("tracking_uri: no answer within 180 s"), "server_away", ""),
    "tracking": (TrackingError("mlflow.yaml:3 is no YAML"), "bad_input", "never"),
    "config": (ConfigError("train.epochs: must be at least 1"), "bad_input", "never"),
    "data": (DataError("data.path: row 3"), "bad_input", "never"),
    "device": (DeviceError("device.name: cuda:3 is not here"), "bad_input", "never"),
    "label": (
        ModelError("model.name: a label is out of range (device-side assert)"),
        "bad_input",
        "",
    ),
    "nan": (Diverged("the loss is nan at step 7"), "diverged", "never"),
    "user's": (KeyError("weight"), "user_code", "never"),
    "user's server": (httpx.ConnectError("refused"), "user_code", "never"),
    "interrupted": (KeyboardInterrupt(), "signal", "never"),
    "terminated": (_caught(OSError("pipe"), SystemExit(143)), "signal", "never"),
    "no sender": (SenderEnded("tracking_uri: no process tells it"), "server_away", ""),
}


@pytest.mark.parametrize(("error", "kind", "cure"), CASES.values(), ids=CASES.keys())
def test_an_error_has_its_class_and_its_cure(error: BaseException, kind: str, cure: str) -> None:
    """cure "": a first start is refused for it, a retry waits again."""
    found = classify_failure(error)
    expected = cure or ("never" if kind == "bad_input" else "in a retry")
    assert (found.kind, found.cure) == (kind, expected)
    assert found.status == ("KILLED" if kind == "signal" else "FAILED")


@pytest.mark.parametrize("error", peer_errors.OWN.values(), ids=peer_errors.OWN)
def test_what_is_an_error_of_a_ranks_own_is_no_lost_process(error: Exception) -> None:
    assert classify_failure(error).kind != "process_lost"


def test_a_prefect_api_that_is_away_is_told_from_a_server_of_the_users_own() -> None:
    nobody = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"})
    with (
        nobody,
        get_client(sync_client=True) as client,
        pytest.raises(httpx.ConnectError) as refused,
    ):
        client.hello()
    assert classify_failure(refused.value) == Failure(
        "server_away", str(refused.value), cure="always"
    )
    with pytest.raises(httpx.ConnectError) as own:
        httpx.get("http://127.0.0.1:9")
    assert classify_failure(own.value).kind == "user_code"


@pytest.mark.parametrize(
    ("said", "kind"),
    [("cuDNN said something new", "device_lost"), ("CUDA error: device-side assert triggered", "")],
)
def test_a_device_that_answers_nothing_any_more_is_lost_whatever_the_error_said(
    said: str, kind: str
) -> None:
    assert classify_failure(RuntimeError(said)).blame_device().kind == (kind or "user_code")
    assert Failure("diverged", said).blame_device().kind == "diverged"
