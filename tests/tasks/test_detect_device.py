"""The task around detection: the same facts, and refusals before anything is spent."""

import pytest
from prefect.cache_policies import NO_CACHE

from headroom.device.detection import DeviceError
from headroom.settings.run_config import RunConfig
from tasks.detect_device import detect_device

CPU = RunConfig.model_validate({"device": {"name": "cpu"}}).device


def test_task_gives_the_facts_of_the_device_that_the_config_names():
    facts = detect_device.fn(CPU)
    assert (facts.name, facts.kind, facts.reason) == ("cpu", "cpu", "cpu, as device.name asks")


def test_task_is_named_as_its_file_and_never_cached():
    assert (detect_device.name, detect_device.cache_policy) == ("detect_device", NO_CACHE)


def test_task_refuses_what_the_device_cannot_do_before_anything_is_spent():
    with pytest.raises(DeviceError, match="^train.precision: tf32 is not for cpu"):
        detect_device.fn(CPU, precision="tf32")
    with pytest.raises(DeviceError, match="^memory.limit_mib: must be above 0 and at most"):
        detect_device.fn(CPU, limit_mib=2.0**30)
    with pytest.raises(DeviceError, match="^device.name: xpu:999 is not here"):
        detect_device.fn(CPU.model_copy(update={"name": "xpu:999"}))
