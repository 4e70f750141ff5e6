"""Who gets the memory: history before forecast, smaller before waiting, waiting before refusing."""

import itertools
import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headroom.base.facts import DataFacts, DeviceFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import DeviceError, TemporaryDeviceError, detect_best_device
from headroom.settings.run_config import (
    DataConfig,
    RunConfig,
)
from headroom.training import admission
from headroom.training.admission import admit_training
from headroom.training.forecast import Forecast
from headroom.training.plan import make_plan
from headroom.training.plan_forecast import forecast_training
from tests.device.machines import make_driver

MIB = 1024**2
NVML = make_driver(
    {
        "GPU-other": [(1, "none of ours", 1)],
        "GPU-1": [(7,), (42, "python", 3 * 1024 * MIB)],
    }
)


class Machine:
    """A GPU whose free memory is written down, and a clock that only sleeping moves."""

    def __init__(self, *free_bytes: float | None) -> None:
        self.free_bytes, self.slept, self.asked = list(free_bytes), [], 0

    def seams(self) -> dict:
        return {
            "free": self.free,
            "nvml": lambda: NVML,
            "now": lambda: sum(self.slept),
            "sleep": self.slept.append,
        }

    def free(self) -> float | None:
        self.asked += 1
        return self.free_bytes.pop(0) if len(self.free_bytes) > 1 else self.free_bytes[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataFacts:
    cache = str(tmp_path_factory.mktemp("data"))
    return prepare_dataset(
        DataConfig(cache=cache, source="synthetic", args={"rows": 600, "features": 50})
    )


@pytest.fixture(scope="module")
def cpu() -> DeviceFacts:
    return detect_best_device("cpu")


@pytest.fixture(scope="module")
def gpu(cpu: DeviceFacts) -> DeviceFacts:
    return replace(cpu, name="cuda:0", kind="cuda", index=0, uuid="GPU-1", total_bytes=2**34)


@pytest.mark.parametrize(("free_mib", "rows"), [(300, 256), (12, 256), (11.5, 32), (1, None)])
def test_a_cpu_in_a_memory_cgroup_gives_no_more_than_its_limit(
    data: DataFacts, cpu: DeviceFacts, monkeypatch: pytest.MonkeyPatch, free_mib: float, rows: int
) -> None:
    """Of a container's 300 MiB nobody knew: the training was killed without a word."""
    monkeypatch.setattr(admission.host_memory, "find_limit_bytes", lambda: 300 * MIB)
    monkeypatch.setattr(admission.host_memory, "read_free_bytes", lambda: int(free_mib * MIB))
    nothing = {"past_peak_bytes": None, "past_micro_batch": None}
    if rows is None:
        words = "training one row at a time needs .* of cpu, and 1.00 MiB are free of the 300 MiB"
        with pytest.raises(TemporaryDeviceError, match=words):
            admit_training(make_plan(config_of(), cpu, data), **nothing)
        return
    found = admit_training(make_plan(config_of(), cpu, data), **nothing)
    assert found.micro_batch == rows
    assert " MiB that cpu has free" in found.reason and "driver" not in found.reason


def config_of(**memory) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": "mlp", "args": {"hidden": [512, 512]}},
            "train": {"batch_size": 256, "precision": "fp32"},
            "memory": memory,
        }
    )


def asked(config: RunConfig, data: DataFacts, device: DeviceFacts, machine: Machine, **past):
    past = {"past_peak_bytes": None, "past_micro_batch": None} | past
    return admit_training(make_plan(config, device, data), **past, **machine.seams())


def test_what_runs_alike_have_taken_is_believed_before_any_forecast(data, gpu):
    machine = Machine(300 * MIB)
    found = asked(config_of(), data, gpu, machine, past_peak_bytes=200 * MIB, past_micro_batch=128)
    assert (found.predicted_bytes, found.source, found.micro_batch) == (200 * MIB, "history", 128)
    assert found.reason == (
        "begins with micro-batches of 128 rows, with which a run alike ended; 200 MiB by what runs "
        "alike have taken, of 300 MiB that cuda:0 has free beside the driver's context"
    )


def test_without_history_a_dry_step_tells(data, gpu):
    told = forecast_training(make_plan(config_of(), gpu, data))
    found = asked(config_of(), data, gpu, Machine(told.needed_bytes))
    assert (found.predicted_bytes, found.source) == (told.peak_bytes, "dry step")
    assert found.micro_batch == 256


@pytest.mark.parametrize("past_peak_bytes", [None, 2**30])
def test_a_smaller_micro_batch_is_what_it_starts_with_where_only_that_fits(
    data, gpu, past_peak_bytes
):
    wide = RunConfig(
        model={"name": "mlp", "args": {"hidden": [8192]}}
    ).model  # so that segments matter less
    config = config_of(wait_s=60).model_copy(update={"model": wide})
    room = forecast_training(make_plan(config, gpu, data), micro_batch=128).needed_bytes
    machine = Machine(room)
    found = asked(config, data, gpu, machine, past_peak_bytes=past_peak_bytes)
    assert (found.micro_batch, found.source, machine.slept) == (128, "dry step", [])
    assert "128 rows" in found.reason and "where 256 would need" in found.reason


def test_what_counts_against_a_limit_is_what_the_allocator_reserves(data, gpu):
    """44 MiB of tensors were admitted under a limit of as much, and failed 11 times down to one
    row: the limit counts segments of 20 MiB."""
    told = forecast_training(make_plan(config_of(), gpu, data))
    limit_mib = (told.peak_bytes + MIB // 2) / MIB
    assert told.needed_bytes > limit_mib * MIB
    with pytest.raises(DeviceError, match="must be at least "):
        asked(config_of(limit_mib=limit_mib), data, gpu, Machine(2**33))


def test_a_history_that_reserved_more_than_there_is_asks_a_dry_step(data, gpu):
    room = forecast_training(make_plan(config_of(), gpu, data)).needed_bytes
    past = {"past_peak_bytes": MIB, "past_reserved_bytes": 2 * room}
    found = asked(config_of(), data, gpu, Machine(room), **past)
    assert (found.micro_batch, found.source) == (256, "dry step")


def test_it_waits_for_memory_and_says_once_for_whom(data, gpu, caplog):
    need = forecast_training(make_plan(config_of(), gpu, data)).needed_bytes
    machine = Machine(MIB, MIB, MIB, need)
    with caplog.at_level(logging.WARNING):
        found = asked(config_of(wait_s=60.0), data, gpu, machine)
    assert (found.micro_batch, machine.slept) == (256, [1.0, 1.0, 1.0])
    (said,) = caplog.messages
    assert said.startswith("waiting up to 60.0 s: ")
    assert "1.00 MiB are free; held by pid 42 (python) 3.00 GiB, pid 7" in said


@pytest.mark.parametrize(("wait_s", "slept"), [(0.0, []), (2.5, [1.0, 1.0, 0.5])])
def test_what_does_not_come_free_in_time_is_refused_with_numbers_and_names(
    data, gpu, wait_s, slept
):
    machine = Machine(MIB)
    with pytest.raises(DeviceError) as caught:
        asked(config_of(wait_s=wait_s), data, gpu, machine)
    text = str(caught.value)
    assert machine.slept == slept
    assert text.startswith("device.name: training one row at a time needs ")
    assert "of cuda:0, and 1.00 MiB are free; held by pid 42 (python) 3.00 GiB, pid 7" in text
    assert text.endswith("or let memory.wait_s wait for it")


def test_nobody_waits_for_what_the_whole_device_does_not_have(data, gpu):
    machine = Machine(MIB)
    with pytest.raises(DeviceError, match="needs .* of cuda:0") as caught:
        asked(config_of(wait_s=60), data, replace(gpu, total_bytes=2 * MIB), machine)
    assert machine.slept == [] and "wait_s" not in str(caught.value)


def test_what_takes_less_than_a_forecast_knows_is_not_refused(data, gpu):
    def admitted(config: RunConfig, **more):
        past = {"past_peak_bytes": None, "past_micro_batch": None}
        return admit_training(make_plan(config, gpu, data), **past, **more, **Machine(1.0).seams())

    with pytest.raises(DeviceError):
        admitted(config_of())
    assert admitted(config_of(), is_shared_out=True).reason == "what is shared out is not forecast"
    again = admitted(config_of(recompute=True))
    assert again.reason == "what is computed again is not forecast" and again.micro_batch == 256


def test_a_gpu_that_tells_nothing_is_no_reason_to_refuse(data, gpu):
    found = asked(config_of(), data, gpu, Machine(None))
    assert found.micro_batch == 256
    assert found.reason.endswith("cuda:0 does not tell what is free")


def test_a_limit_is_room_too(data, gpu, cpu):
    need = forecast_training(
        make_plan(config_of(limit_mib=6.0), cpu, data), micro_batch=64
    ).needed_bytes
    config = config_of(limit_mib=need / MIB)
    on_cpu, on_gpu = Machine(None), Machine(2**33)
    assert asked(config, data, cpu, on_cpu).micro_batch == 64
    with pytest.raises(DeviceError, match="^memory.limit_mib: must be at least "):
        asked(config, data, gpu, on_gpu)  # cuBLAS alone takes more


def test_a_limit_names_itself_where_what_is_held_already_makes_it_too_small(data, gpu, monkeypatch):
    """A process that held memory from before was told that the device had too little free."""
    held = {"reserved": 64 * MIB}
    monkeypatch.setattr(admission, "make_allocator", lambda _: SimpleNamespace(read=lambda: held))
    need_mib = (
        forecast_training(make_plan(config_of(), gpu, data), micro_batch=1).needed_bytes / MIB
    )
    with pytest.raises(DeviceError) as caught:
        asked(config_of(limit_mib=need_mib + 1), data, gpu, Machine(2**33))
    least = math.ceil(need_mib + 64)
    assert str(caught.value).startswith(
        f"memory.limit_mib: must be at least {least}, for one row at a time beside 64.0 MiB that "
        "this process holds already (got "
    )


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_limit_below_the_parameters_is_refused_in_one_sentence(kind, data, request):
    with pytest.raises(DeviceError) as caught:
        asked(config_of(limit_mib=0.5), data, request.getfixturevalue(kind), Machine(2**33))
    weights = 4 * (50 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10) / MIB
    assert str(caught.value) == (
        f"memory.limit_mib: must be more than the {weights:.2f} MiB of the parameters alone "
        "(got 0.5); raise it, or make the model smaller"
    )


def test_a_limit_is_kept_to_the_byte(data, gpu):
    told = forecast_training(make_plan(config_of(), gpu, data), micro_batch=1)
    just = told.needed_bytes / MIB
    found = asked(config_of(limit_mib=just), data, gpu, Machine(2**33))
    assert found.predicted_bytes <= told.needed_bytes
    with pytest.raises(DeviceError, match="^memory.limit_mib: must be at least "):
        asked(config_of(limit_mib=just - 1 / 1024), data, gpu, Machine(2**33))


def test_a_cpu_without_a_limit_is_not_asked(data, cpu):
    machine = Machine(0)
    found = asked(config_of(), data, cpu, machine, past_micro_batch=32)
    assert (found.predicted_bytes, found.source, found.micro_batch) == (None, "", 32)
    assert found.reason.startswith("begins with micro-batches of 32 rows, with which a run alike")
    assert machine.asked == 0 and found.fits_graph


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"optim": {"name": "NAdam"}}, "optim.name: what NAdam will take cannot be told"),
        ({"train": {"loss": "peeking:loss"}}, "train.loss: what peeking:loss will take cannot"),
    ],
)
def test_what_cannot_be_foretold_is_let_in_and_told(data, gpu, own, sections, told):
    own("peeking", "def loss(outputs, y):\n    return outputs.sum() * outputs.max().item()\n")
    machine = Machine(0)
    found = asked(RunConfig.model_validate(sections), data, gpu, machine)
    assert (found.predicted_bytes, found.source, machine.asked) == (None, "", 0)
    assert found.reason.startswith(told)


@pytest.mark.parametrize("free", [None, 0, 7])
def test_what_is_free_is_what_the_device_tells(free, gpu, monkeypatch):
    """Of a device that nobody has used yet nothing is told at all."""
    space = None if free is None else SimpleNamespace(free_bytes=free, total_bytes=9)
    monkeypatch.setattr(
        admission, "make_allocator", lambda _: SimpleNamespace(read_space=lambda: space)
    )
    assert admission.read_free_bytes(gpu) == free


# With forecasts that are written down: ten MiB a row beside ten, and twenty more in a graph


@pytest.fixture
def written(monkeypatch) -> list[int]:
    """The rows that were asked about."""
    rows: list[int] = []

    def told(plan, *, micro_batch) -> Forecast:
        rows.append(micro_batch)
        needed = 10 * MIB * (micro_batch + 1)
        made = Forecast(needed - MIB, None, needed, "backward", {}, {}, 5 * MIB, micro_batch)
        return replace(made, graphed=replace(made, needed_bytes=needed + 20 * MIB))

    monkeypatch.setattr(admission, "forecast_training", told)
    return rows


def small(**memory) -> RunConfig:
    return config_of(**memory).model_copy(
        update={"train": RunConfig(train={"batch_size": 11}).train}
    )


def test_of_the_halves_of_a_batch_the_largest_that_fits_is_taken_to_the_byte(data, gpu, written):
    for room_mib, rows in ((120, 11), (119, 6), (70, 6), (69, 3), (40, 3), (30, 2), (20, 1)):
        found = asked(small(), data, gpu, Machine(room_mib * MIB))
        assert (found.micro_batch, found.predicted_bytes) == (rows, (10 * rows + 9) * MIB)
        assert found.reason.startswith("starts with micro-") == (rows < 11)
        assert found.forecast is not None and found.forecast.micro_batch == rows
    with pytest.raises(
        DeviceError, match="^device.name: .* needs 20.0 MiB of cuda:0, and 19.0 MiB"
    ):
        asked(small(), data, gpu, Machine(19 * MIB))
    written.clear()
    asked(small(), data, gpu, Machine(30 * MIB))
    assert written == [11, 6, 3, 2], "each is foretold once"


def test_a_micro_batch_is_that_of_accumulate_and_of_runs_alike(data, gpu, written):
    accumulated = small().model_copy(
        update={"train": RunConfig(train={"batch_size": 11, "accumulate": 2}).train}
    )
    for config, past, rows in (
        (small(), None, 11),
        (small(), 4, 4),
        (small(), 20, 11),
        (accumulated, None, 6),
        (accumulated, 9, 6),
        (accumulated, 5, 5),
    ):
        machine = Machine(2**40)
        found = asked(config, data, gpu, machine, past_micro_batch=past)
        told = f"begins with micro-batches of {past} rows, with which a run alike ended; "
        assert found.micro_batch == rows
        assert found.reason.startswith(told) == (past in (4, 5)), "nobody was told"


def test_a_graph_fits_where_its_room_is_there_to_the_byte(data, gpu, written):
    assert asked(small(), data, gpu, Machine(140 * MIB)).fits_graph
    assert not asked(small(), data, gpu, Machine(140 * MIB - 1)).fits_graph


def test_history_is_believed_where_what_it_reserved_is_there_to_the_byte(data, gpu, written):
    past = {"past_peak_bytes": 10 * MIB, "past_reserved_bytes": 30 * MIB}
    assert asked(small(), data, gpu, Machine(30 * MIB), **past).source == "history"
    assert asked(small(), data, gpu, Machine(30 * MIB - 1), **past).source == "dry step"
    past = {"past_peak_bytes": 10 * MIB}
    assert asked(small(), data, gpu, Machine(10 * MIB), **past).source == "history"


def test_a_limit_that_the_parameters_fill_is_not_hopeless(data, gpu, written):
    """Of 5 MiB of parameters; what runs alike have taken is asked first."""
    with pytest.raises(DeviceError, match="^memory.limit_mib: must be more than the 5.00 MiB of"):
        asked(small(limit_mib=4.999), data, gpu, Machine(2**33))
    with pytest.raises(DeviceError, match="^memory.limit_mib: must be at least 20, for one row at"):
        asked(small(limit_mib=5), data, gpu, Machine(2**33))
    written.clear()
    for limit_mib in (4.5, 4):
        past = {"past_peak_bytes": 4 * MIB}
        assert (
            asked(small(limit_mib=limit_mib), data, gpu, Machine(2**33), **past).micro_batch == 11
        )
    assert written == []
    with pytest.raises(DeviceError, match="^memory.limit_mib: must be more than"):
        past = {"past_peak_bytes": MIB, "past_reserved_bytes": 4 * MIB + 1}
        asked(small(limit_mib=4), data, gpu, Machine(2**33), **past)


@pytest.mark.parametrize("held_mib", [0, 7])
def test_a_limit_is_at_fault_where_one_row_beside_what_is_held_passes_it(
    data, gpu, written, monkeypatch, held_mib
):
    held = SimpleNamespace(read=lambda: {"reserved": held_mib * MIB} if held_mib else {})
    monkeypatch.setattr(admission, "make_allocator", lambda _: held)
    least = 20 + held_mib
    with pytest.raises(DeviceError) as caught:
        asked(small(limit_mib=least - 0.5), data, gpu, Machine(2**33))
    beside = " beside 7.00 MiB that this process holds already" if held_mib else ""
    assert str(caught.value) == (
        f"memory.limit_mib: must be at least {least}, for one row at a time{beside} "
        f"(got {least - 0.5:g}); raise it, or make the model smaller"
    )
    assert asked(small(limit_mib=least), data, gpu, Machine(2**33)).micro_batch == 1
    with pytest.raises(DeviceError, match="^device.name: "):
        asked(small(limit_mib=least), data, gpu, Machine(MIB))


def test_waiting_is_a_remedy_where_the_whole_device_would_do_to_the_byte(data, gpu, written):
    for total, slept in ((20 * MIB, [1.0, 1.0]), (20 * MIB - 1, [])):
        machine = Machine(MIB)
        with pytest.raises(DeviceError) as caught:
            asked(small(wait_s=2), data, replace(gpu, total_bytes=total), machine)
        assert machine.slept == slept
        assert ("or let memory.wait_s wait for it" in str(caught.value)) == bool(slept)
        assert f"and {1.0:.2f} MiB are free" in str(caught.value)


def test_it_asks_for_the_last_time_when_the_time_is_over(data, gpu, written):
    machine = Machine(*[MIB] * 3, 2**33)
    assert asked(small(wait_s=2.5), data, gpu, machine).micro_batch == 11
    assert machine.slept == [1.0, 1.0, 0.5]


def test_where_asking_takes_longer_than_is_left_it_asks_again_at_once(data, gpu, written):
    clock, machine = itertools.count(0, 0.75), Machine(MIB)
    with pytest.raises(DeviceError):
        admit_training(
            make_plan(small(wait_s=1), gpu, data),
            past_peak_bytes=None,
            past_micro_batch=None,
            **{**machine.seams(), "now": lambda: next(clock)},
        )
    assert machine.slept == [0.0] and machine.asked == 2


@pytest.mark.parametrize("many", [0, 1, 4, 5, 7])
def test_the_four_that_hold_most_are_named_and_the_rest_counted(data, gpu, written, many):
    found = [(1,), *((i, f"job{i}", i * MIB) for i in range(2, many + 1))][:many]
    nvml = make_driver({"GPU-1": found})
    with pytest.raises(DeviceError) as caught:
        admit_training(
            make_plan(small(), gpu, data),
            past_peak_bytes=None,
            past_micro_batch=None,
            free=lambda: MIB,
            nvml=lambda: nvml,
        )
    named = [f"pid {i} (job{i}) {i}.00 MiB" for i in range(many, 1, -1)] + ["pid 1"] * (many > 0)
    words = f"; held by {', '.join(named[:4])}" + f" and {many - 4} more" * (many > 4)
    assert f"1.00 MiB are free{words * (many > 0)}; make the model" in str(caught.value)
