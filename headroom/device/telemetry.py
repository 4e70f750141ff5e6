"""Read what NVIDIA's driver tells of one GPU while a run uses it: load, power, heat, energy and
throttling. Of the leased GPU alone, found by its UUID, since NVML's order is not PyTorch's. What
the driver does not tell is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Reasons to run below full speed that a user can act on; not idleness or clocks asked for.
_THROTTLES = (
    "nvmlClocksThrottleReasonSwPowerCap",
    "nvmlClocksThrottleReasonHwSlowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
)


class Telemetry:
    """Samples one GPU. For an unknown GPU, or without NVML, every sample is empty."""

    def __init__(self, uuid: str | None, nvml: Any = None, *, energy_j: float = 0.0) -> None:
        """energy_j: that the run has used before."""
        self._nvml = nvml
        self._used_before_j = energy_j
        self._handle: Any = None
        self._is_open = False
        self._energy_before_mj: float | None = None
        if uuid is not None:
            self._open(uuid)

    def sample(self) -> dict[str, float]:
        """Return metrics in the names of the run record; energy in joules, from the first
        sample on."""
        if self._handle is None:
            return {}
        nvml, gpu = self._nvml, self._handle
        readings = {
            "gpu/utilization_pct": self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
            "gpu/power_w": self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            "gpu/temperature_c": self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            "gpu/energy_j": self._ask(self._read_energy_j),
            "gpu/throttled": self._ask(self._read_throttling),
        }
        return {name: float(value) for name, value in readings.items() if value is not None}

    def close(self) -> None:
        """Release the driver; samples are empty from here on."""
        self._handle = None
        if self._is_open:
            self._is_open = False
            self._nvml.nvmlShutdown()

    def _open(self, uuid: str) -> None:
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                return
            self._nvml = pynvml
        full = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:
            return  # no driver here
        self._is_open = True
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(full)
        except self._nvml.NVMLError:
            self.close()  # not its GPU: nothing is known

    def _ask(self, question: Callable[[], float]) -> float | None:
        try:
            return question()
        except self._nvml.NVMLError:  # this GPU does not tell that
            return None

    def _read_energy_j(self) -> float:
        now_mj = float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        if self._energy_before_mj is None:
            self._energy_before_mj = now_mj
        return self._used_before_j + (now_mj - self._energy_before_mj) / 1000

    def _read_throttling(self) -> float:
        reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        mask = 0
        for name in _THROTTLES:
            mask |= getattr(self._nvml, name)
        return float(bool(reasons & mask))
