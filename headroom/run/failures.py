"""Classifies a failure by the error and those that caused it, and says whether the same
training in a new process may get further. What is not known is `user_code`: nothing is
hoped for.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from typing import Literal

from headroom.base.import_paths import get_error_message as words_of
from headroom.device.detection import TemporaryDeviceError
from headroom.process import signals
from headroom.ranks.ranks import LostProcess, LostRank
from headroom.run.preflight import BAD_INPUT
from headroom.tracking.journal import SenderEnded
from headroom.tracking.tracking_settings import TrackingError
from headroom.training.checkpoints import NoRoom
from headroom.watch.oom_report import OutOfMemory
from headroom.watch.out_of_memory import is_oom, list_error_chain
from headroom.watch.step_metrics import Diverged

# What no later call of this process survives, and what a driver says of a device that has gone.
# https://docs.nvidia.com/cuda/cuda-runtime-api: "the process must be terminated and relaunched".
_LOST = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|invalid program counter"
    r"|launch failure|launch timed out|hardware stack error|global/shared address space"
    r"|(CUDA|HIP)( driver)? error: unknown error|uncorrectable|context is destroyed"
    r"|GPU is lost|fallen off the bus|busy or unavailable|UR_RESULT_ERROR_DEVICE_LOST"
    r"|CUDA_ERROR_(ILLEGAL|LAUNCH_(FAILED|TIMEOUT)|MISALIGNED|INVALID_(PC|ADDRESS_SPACE)|ECC|NVLINK"
    r"|HARDWARE_STACK|CONTEXT_IS_DESTROYED|DEVICE_UNAVAILABLE|UNKNOWN)"
    r"|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_EXECUTION_FAILED",
    re.IGNORECASE,
)
_FULL = re.compile(r"No space left on device|Disk quota exceeded|database or disk is full")
# A wrong index is the same in any process; see failed_step.py, which names it where it can.
_ASSERT = "device-side assert triggered"


@dataclass(frozen=True)
class Failure:
    """How a run failed or was killed."""

    kind: str
    said: str  # the reason, for a person
    status: Literal["FAILED", "KILLED"] = "FAILED"
    # What a new process may cure: where the run had begun, or where it has been a retry already,
    # since a first start is refused for it and its user is there.
    cure: Literal["never", "always", "in a retry"] = "never"

    def blame_device(self) -> Failure:
        """Return the failure, or device_lost, since the device answers nothing but errors."""
        if self.kind != "user_code" or _ASSERT in self.said:
            return self
        return Failure("device_lost", self.said, cure="always")


def classify_failure(error: BaseException) -> Failure:
    """Return the class of the failure that ended a run by this error."""
    errors = list_error_chain(error)
    said = words_of(error) or type(error).__name__
    # A signal may have been overtaken by an error of the clearing up that it caused.
    if signals.find_exit_code() or any(not isinstance(one, Exception) for one in errors):
        said = signals.describe_signal() if signals.find_exit_code() else said
        return Failure("signal", said, "KILLED")
    if any(isinstance(one, NoRoom) for one in errors):
        return Failure("disk_full", said)
    if any(
        getattr(one, "errno", None) in (ENOSPC, EDQUOT) or _is_match(_FULL, one) for one in errors
    ):
        return Failure("disk_full", said)
    kind = next(filter(None, map(_find_kind, errors)), None)
    return Failure(kind[0], said, cure=kind[1]) if kind else Failure("user_code", said)


def _find_kind(
    error: BaseException,
) -> tuple[str, Literal["never", "always", "in a retry"]] | None:
    if isinstance(error, TemporaryDeviceError):
        return error.kind, "in a retry"
    if isinstance(error, SenderEnded):
        return "server_away", "in a retry"
    if isinstance(error, TrackingError) and str(error).startswith("tracking_uri:"):
        return "server_away", "in a retry"
    if isinstance(error, BAD_INPUT):
        return "bad_input", "never"
    if isinstance(error, (LostRank, LostProcess)):  # whoever launched them begins them again
        return "process_lost", "never"
    if isinstance(error, Diverged):
        return "diverged", "never"
    if isinstance(error, OutOfMemory) or is_oom(error):
        explained = error.explanation.message if isinstance(error, OutOfMemory) else None
        return "out_of_memory", "always" if explained and explained.is_held_by_others else "never"
    if isinstance(error, RuntimeError) and _ASSERT in str(error):
        return "user_code", "never"
    if isinstance(error, RuntimeError) and _is_match(_LOST, error):
        return "device_lost", "always"
    return ("server_away", "always") if _is_prefect_away(error) else None


def _is_match(words: re.Pattern[str], error: BaseException) -> bool:
    return words.search(str(error)) is not None


def _is_prefect_away(error: BaseException) -> bool:
    """Return whether Prefect's API is away.

    A server of the user's own, asked the same way, is not meant.
    """
    httpx = sys.modules.get("httpx")  # its import takes long, and draws random numbers
    if httpx is None:
        return False
    is_away = isinstance(error, httpx.TransportError)
    if isinstance(error, httpx.HTTPStatusError):
        is_away = error.response.status_code >= 500
    trace = error.__traceback__ if is_away else None
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("prefect.client."):
            return True
        trace = trace.tb_next
    return False
