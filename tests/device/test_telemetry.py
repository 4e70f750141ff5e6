from types import SimpleNamespace

import pynvml
import pytest

from headroom.device.telemetry import Telemetry

UUID = "GPU-1234"


class Driver:
    """What NVML answers for one GPU; its names and numbers are those of the real library."""

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, *, mute: tuple[str, ...] = (), reasons: int = 0) -> None:
        self.mute, self.reasons, self.energy_mj = mute, reasons, 5_000_000
        self.opened = 0

    def __getattr__(self, name: str):
        if name.startswith("nvmlClocks"):
            return getattr(pynvml, name)
        if name in self.mute:
            return self._refuse
        return {
            "nvmlInit": lambda: setattr(self, "opened", self.opened + 1),
            "nvmlShutdown": lambda: setattr(self, "opened", self.opened - 1),
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=83),
            "nvmlDeviceGetPowerUsage": lambda gpu: 412_500,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 61,
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: self.energy_mj,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: self.reasons,
        }[name]

    def _handle(self, uuid: str) -> str:
        if uuid != UUID:
            self._refuse()
        return uuid

    def _refuse(self, *_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize("uuid", [UUID, "1234"])
def test_a_sample_has_the_units_of_the_record(uuid: str) -> None:
    driver = Driver()
    telemetry = Telemetry(uuid, driver)
    first = telemetry.sample()
    assert first == {
        "gpu/utilization_pct": 83,
        "gpu/power_w": 412.5,
        "gpu/temperature_c": 61,
        "gpu/energy_j": 0,
        "gpu/throttled": 0,
    }
    driver.energy_mj += 42_000
    assert telemetry.sample()["gpu/energy_j"] == 42
    assert Telemetry(uuid, driver, energy_j=7.0).sample()["gpu/energy_j"] == 7, "of a run before"


@pytest.mark.parametrize(
    ("reason", "throttled"),
    [
        ("nvmlClocksThrottleReasonGpuIdle", 0),
        ("nvmlClocksThrottleReasonSwPowerCap", 1),
        ("nvmlClocksThrottleReasonHwThermalSlowdown", 1),
    ],
)
def test_idleness_is_no_throttling(reason: str, throttled: int) -> None:
    driver = Driver(reasons=getattr(pynvml, reason))
    assert Telemetry(UUID, driver).sample()["gpu/throttled"] == throttled


def test_what_the_driver_does_not_tell_is_absent() -> None:
    driver = Driver(mute=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption"))
    found = Telemetry(UUID, driver).sample()
    assert set(found) == {"gpu/utilization_pct", "gpu/temperature_c", "gpu/throttled"}


@pytest.mark.parametrize("uuid", [UUID, "GPU-of-another"])
def test_the_driver_is_let_go_of_at_the_end_and_where_it_has_no_such_gpu(uuid: str) -> None:
    driver = Driver()
    telemetry = Telemetry(uuid, driver)
    assert driver.opened == (uuid == UUID)
    telemetry.close()
    telemetry.close()
    assert driver.opened == 0 and telemetry.sample() == {}


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    assert Telemetry(None).sample() == {}
    assert Telemetry("GPU-of-another-host", Driver()).sample() == {}
