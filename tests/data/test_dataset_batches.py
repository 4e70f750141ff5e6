import gc
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from headroom.data import prefetch
from headroom.data.dataset_batches import (
    BLOCK_BYTES,
    MIB,
    ResidentBatches,
    StreamedBatches,
    choose_layout,
    draw_row_order,
    place_rows,
)
from headroom.data.preparation import view_token_rows

CPU = torch.device("cpu")
AWAY = torch.device("meta")  # not the CPU, and can't read pinned memory: what MPS is, without data
PLENTY = 10**9


def nothing(phase: str) -> None:
    pass


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("in-order")}


@pytest.fixture
def on_disk(tmp_path):
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    y = np.arange(20)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    return tuple(np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in "xy")


def tokens(tmp_path, *, dtype, high: int, count: int = 48, context: int = 5):
    """A text on disk, mapped, and the two views of its rows that a training reads."""
    kept = np.random.default_rng(0).integers(0, high, count).astype(dtype)
    kept[:3] = high - 1
    np.save(tmp_path / "text.npy", kept)
    return kept, *view_token_rows(np.load(tmp_path / "text.npy", mmap_mode="r"), context)


def test_data_that_fits_lives_on_the_device_and_says_so(on_disk) -> None:
    fed = place_rows(*on_disk, device=CPU, room_bytes=10**6)
    assert isinstance(fed, ResidentBatches)
    assert fed.residency == "device"
    assert fed.reason == "400 B of rows take at most half of the 0.95 MiB of room on cpu"


@pytest.mark.parametrize("free_bytes", [0, 700])
def test_data_that_does_not_fit_is_streamed(on_disk, free_bytes) -> None:
    fed = place_rows(*on_disk, device=CPU, room_bytes=free_bytes)
    assert isinstance(fed, StreamedBatches)
    assert fed.residency == "host"
    assert "400 B of rows are over half of the " in fed.reason
    assert fed.reason.endswith("of room on cpu: streamed from disk")


@pytest.mark.parametrize("room_bytes", [0, PLENTY])
@given(rows=st.integers(1, 40), size=st.integers(1, 50), seed=st.integers(0, 5), used=st.booleans())
@settings(max_examples=25, deadline=None)
def test_batches_are_those_of_plain_indexing(room_bytes, rows, size, seed, used) -> None:
    x = np.random.default_rng(seed).normal(size=(rows, 2, 3)).astype(np.float32)
    y = np.arange(rows)
    fed = place_rows(x, y, device=CPU, room_bytes=room_bytes)
    order = draw_row_order(rows, seed=seed, epoch=0)[: rows if used else max(1, rows // 2)]
    found = list(fed.iterate_shuffled(size, order, nothing))
    assert len(found) == len(order.split(size))
    assert len(fed) == rows and fed.count_steps(size) == -(-rows // size)
    for (got_x, got_y, *_), chosen in zip(found, order.split(size), strict=True):
        expected = chosen if room_bytes else chosen.sort().values
        assert torch.equal(got_x, torch.from_numpy(x)[expected])
        assert torch.equal(got_y, torch.from_numpy(y)[expected])
    in_order = list(fed.iterate_in_order(size))
    assert [batch.rows for batch in in_order] == [len(batch.y) for batch in in_order]
    for whole, parts in ((x, [b.x for b in in_order]), (y, [b.y for b in in_order])):
        assert torch.equal(torch.cat(parts), torch.from_numpy(whole))
        assert len(parts) == fed.count_steps(size)
    assert not threads()


def test_many_blocks_arrive_whole_and_detached_from_the_file(monkeypatch) -> None:
    assert BLOCK_BYTES >= MIB
    monkeypatch.setattr("headroom.data.dataset_batches.BLOCK_BYTES", 40)
    x = np.arange(70, dtype=np.float32).reshape(35, 2)
    fed = place_rows(x, np.arange(35), device=CPU, room_bytes=PLENTY)
    assert torch.equal(fed.x, torch.from_numpy(x))
    x[:] = -1
    assert fed.x.min() == 0 and fed.y[-1] == 34


@pytest.mark.parametrize("room_bytes", [0, PLENTY])
@pytest.mark.parametrize(("dtype", "high"), [(np.uint8, 256), (np.uint16, 65536)])
def test_tokens_stay_narrow_and_arrive_as_they_were(tmp_path, room_bytes, dtype, high) -> None:
    kept, x, y = tokens(tmp_path, dtype=dtype, high=high)
    arrays, layout = choose_layout(x, y, channels_last=False)
    assert len(arrays) == 1 and arrays[0].nbytes == kept.nbytes, "moved once, not twice"
    fed = place_rows(x, y, device=CPU, room_bytes=room_bytes)
    wide = torch.from_numpy(kept.astype(np.int64))
    order = fed.draw_order(seed=0, epoch=0)
    straight = torch.arange(len(fed)) * 5
    for batches, begins in (
        (fed.iterate_shuffled(4, order, nothing), order),
        (fed.iterate_in_order(4), straight),
    ):
        rows = wide.unfold(0, 6, 1)[begins]
        for (got_x, got_y, *_), expected in zip(batches, rows.split(4), strict=True):
            assert got_x.dtype == got_y.dtype == torch.int64
            assert got_x.is_contiguous() and got_y.is_contiguous()
            assert torch.equal(got_x[:, 1:], got_y[:, :-1])
            # A streamed batch holds its rows in the order of the file.
            got = torch.cat([got_x, got_y[:, -1:]], 1)
            assert sorted(got.tolist()) == sorted(expected.tolist())
    assert layout.context == 5 and wide.max() == high - 1


@pytest.mark.parametrize("room_bytes", [0, PLENTY])
def test_rows_of_tokens_begin_elsewhere_in_each_epoch_and_are_judged_where_they_were(
    tmp_path, room_bytes
) -> None:
    """Always cut at the same tokens, a text was learnt from less well than by nanoGPT."""
    _, x, y = tokens(tmp_path, dtype=np.uint8, high=256, count=1003, context=50)
    fed = place_rows(x, y, device=CPU, room_bytes=room_bytes)
    shifts = set()
    for epoch in range(20):
        begins = fed.draw_order(seed=3, epoch=epoch)
        assert torch.equal(begins, fed.draw_order(seed=3, epoch=epoch))
        assert len(begins) == len(fed) == 20 and begins.min() >= 0
        assert begins.max() + 50 < 1003, "no row reaches beyond the text"
        *apart, last = begins.sort().values.diff().tolist()
        assert set(apart) == {50} and 0 < last <= 50, "no token twice, but at the end"
        shifts.add(begins.min().item())
    assert len(shifts) > 10 and max(shifts) < 50
    judged = torch.cat([rows for rows, *_ in fed.iterate_in_order(6)])
    assert torch.equal(judged, torch.from_numpy(x.astype(np.int64)))


def test_arrays_that_only_look_shared_are_kept_apart() -> None:
    base = np.arange(24).reshape(4, 6)
    for x, y in (
        (base[:, :-1], base[:, 1:].copy()),
        (base[:, 1:].copy(), base[:, :-1].copy()),
        (base.copy(), base[:, 0].copy()),
    ):
        arrays, layout = choose_layout(np.ascontiguousarray(x), y, channels_last=False)
        assert len(arrays) == 2 and layout.context is None
    with pytest.raises(AssertionError, match="side by side"):
        choose_layout(base[:, 1:], base[:, :-1], channels_last=False)


@pytest.mark.parametrize("room_bytes", [0, PLENTY])
@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4, 4), (2, 1, 1)])
def test_images_come_channels_last_when_asked(room_bytes, shape) -> None:
    x = np.random.default_rng(0).normal(size=(11, *shape)).astype(np.float32)
    fed = place_rows(x, np.arange(11), device=CPU, room_bytes=room_bytes, channels_last=True)
    found = [
        *fed.iterate_shuffled(4, draw_row_order(11, seed=0, epoch=0), nothing),
        *fed.iterate_in_order(4),
    ]
    for images, rows, *_ in found:
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images, torch.from_numpy(x)[rows])


def test_rows_without_pixels_have_no_channels_to_put_last(on_disk) -> None:
    fed = place_rows(*on_disk, device=CPU, room_bytes=PLENTY, channels_last=True)
    assert torch.equal(next(fed.iterate_in_order(20))[0], torch.from_numpy(np.array(on_disk[0])))


@pytest.mark.parametrize("channels_last", [False, True])
def test_in_place_all_batches_of_all_epochs_come_in_one_memory(channels_last) -> None:
    x = np.random.default_rng(0).normal(size=(11, 2, 3, 3)).astype(np.float32)
    arrays, layout = choose_layout(x, np.arange(11), channels_last=channels_last)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    parts = (
        torch.from_numpy(arrays[0]).contiguous(memory_format=memory_format),
        torch.from_numpy(arrays[1]),
    )
    fed = ResidentBatches(parts, layout, reason="", in_place=True)
    places = set()
    for epoch in range(2):
        for images, rows, *_ in fed.iterate_shuffled(
            4, draw_row_order(11, seed=0, epoch=epoch), nothing
        ):
            places.add((images.data_ptr(), rows.data_ptr()))
            assert torch.equal(images, torch.from_numpy(x)[rows])
            assert images.is_contiguous(memory_format=memory_format)
    assert len(places) == 1
    fed.close()
    assert len([*fed.iterate_shuffled(5, draw_row_order(11, seed=0, epoch=0), nothing)][-1][0]) == 1


@pytest.mark.parametrize("room_bytes", [0, PLENTY])
def test_the_wait_for_data_is_marked_and_a_cpu_copies_nothing(on_disk, room_bytes) -> None:
    marks: list[str] = []
    fed = place_rows(*on_disk, device=CPU, room_bytes=room_bytes)
    for number, _ in enumerate(fed.iterate_shuffled(6, torch.arange(20), marks.append), start=1):
        assert marks == ["data_wait"] * number
    assert fed.copy_s is None


def test_a_row_that_is_not_there_is_never_read(on_disk) -> None:
    with pytest.raises(IndexError, match="index 20 is out of bounds"):
        list(
            place_rows(*on_disk, device=CPU, room_bytes=0).iterate_shuffled(
                6, torch.arange(15, 21), nothing
            )
        )
    whole = [torch.empty(6, 3), torch.empty(6, dtype=torch.int64)]
    for rows in (np.arange(15, 21), np.arange(-1, 5)):
        with pytest.raises(AssertionError, match="a row that is not there"):
            prefetch.gather_rows(on_disk, rows, whole)


def test_a_cpu_reads_without_a_thread(on_disk) -> None:
    for _ in place_rows(*on_disk, device=CPU, room_bytes=0).iterate_in_order(6):
        assert not threads()


def test_what_was_read_ahead_is_sent_and_marked(on_disk) -> None:
    marks: list[str] = []
    fed = place_rows(*on_disk, device=AWAY, room_bytes=0)
    found = list(fed.iterate_shuffled(6, torch.arange(20), marks.append))
    assert {part.device.type for batch in found for part in batch[:2]} == {"meta"}
    assert [batch.rows for batch in found] == [6, 6, 6, 2]
    assert marks == ["data_wait", "h2d"] * 4


def test_no_thread_outlives_an_iteration_that_breaks_raises_or_is_dropped(on_disk) -> None:
    fed = place_rows(*on_disk, device=AWAY, room_bytes=0)
    for _ in fed.iterate_shuffled(2, torch.arange(20), nothing):
        assert len(threads()) == 1
        break
    assert not threads()
    with pytest.raises(KeyError) as caught:
        for _ in fed.iterate_shuffled(2, torch.arange(20), nothing):
            raise KeyError("the step failed")
    assert not threads() and caught.tb is not None
    next(iter(fed.iterate_shuffled(2, torch.arange(20), nothing)))
    assert not threads()


class DiskError(OSError):
    """A subclass, since only these can be referred to weakly."""


class Broken(np.ndarray):
    """A file whose disk fails at some rows."""

    def take(self, rows, **how):
        if 13 in rows:
            raise DiskError(5, "Input/output error")
        return super().take(rows, **how)


@pytest.mark.parametrize("device", [CPU, AWAY], ids=str)
def test_an_error_of_the_disk_is_raised_by_the_loop_and_keeps_nothing(device) -> None:
    x = np.zeros((20, 3), np.float32)
    fed = place_rows(x, np.arange(20), device=device, room_bytes=0)
    fed._arrays = (fed._arrays[0].view(Broken), fed._arrays[1])
    seen, kept = [], []
    gc.disable()  # what is kept must go without the collector's help
    try:
        try:
            for _, y, *_ in fed.iterate_shuffled(5, torch.arange(20), nothing):
                seen.append(len(y))
        except DiskError as error:
            assert error.errno == 5
            kept.append(weakref.ref(error))
        assert seen == [5, 5] and not threads()
        assert kept[0]() is None, "somebody keeps the exception, and its frames the buffers"
    finally:
        gc.enable()


class Token:
    """One point in a stream's work."""

    def __init__(self, stream) -> None:
        self.stream, self.passed = stream, False


class FakeStream:
    """Does what it was given as late as anything that waits for it allows."""

    def __init__(self) -> None:
        self.work: list = []
        self.given = self.done = 0

    def run(self, work) -> None:
        self.given += 1
        self.work.append(work)

    def wait_event(self, event) -> None:
        token = event.token
        self.work.append(lambda: token.stream.drain(token))

    def wait_stream(self, other) -> None:
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)

    def drain(self, until: Token | None = None) -> None:
        while self.work and not (until and until.passed):
            item = self.work.pop(0)
            if isinstance(item, Token):
                item.passed = True
            else:
                item()


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.token: Token | None = None

    def record(self, stream: FakeStream) -> None:
        self.token = Token(stream)
        stream.work.append(self.token)

    def synchronize(self) -> None:
        self.token.stream.drain(self.token)

    def elapsed_time(self, other) -> float:
        return 2.0  # milliseconds


class FakeBackend:
    """What torch.cuda and torch.xpu offer, on tensors of the CPU, to one thread only."""

    Event = FakeEvent

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.compute = FakeStream()
        self.side: FakeStream | None = None

    def Stream(self, device):
        self.side = FakeStream()
        return self.side

    def current_stream(self, device):
        assert threading.get_ident() == self.owner, "the device is the training thread's"
        return self.compute

    @contextmanager
    def stream(self, side):
        compute = self.compute

        class Deferred(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if function is not torch.Tensor.copy_:
                    return function(*args, **(kwargs or {}))
                needed = compute.given

                def copy() -> None:
                    assert compute.done >= needed, "written while earlier work may read it"
                    args[0].copy_(args[1])

                side.work.append(copy)
                return args[0]

        with Deferred():
            yield


@pytest.fixture
def backend(monkeypatch):
    def room(arrays, rows):
        return [torch.empty(rows, *a.shape[1:], dtype=prefetch.find_dtype(a)) for a in arrays]

    made = FakeBackend()
    monkeypatch.setattr(prefetch.torch, "get_device_module", lambda device: made)
    monkeypatch.setattr(prefetch, "allocate_pinned_rows", room)
    return made


def pinned(x: np.ndarray, y: np.ndarray) -> StreamedBatches:
    arrays, layout = choose_layout(x, y, channels_last=False)
    return StreamedBatches(
        arrays, layout, device=CPU, residency="pinned", reason="", is_spare=False
    )


def compute_on(backend: FakeBackend, batch, seen: list) -> None:
    """Queue what a step does with its batch: it reads it when the device gets there."""

    def read() -> None:
        backend.compute.done += 1
        seen.append(tuple(part.clone() for part in batch if isinstance(part, torch.Tensor)))

    backend.compute.run(read)


@pytest.mark.parametrize("rows", [1, 4, 5, 23])
@pytest.mark.parametrize("in_order", [False, True])
def test_buffers_used_again_never_corrupt_a_batch_on_its_way(backend, rows, in_order) -> None:
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    y = np.arange(rows)
    fed = pinned(x, y)
    for epoch in range(2):  # the second epoch finds the first one's copies still under way
        seen: list = []
        order = draw_row_order(rows, seed=0, epoch=epoch)
        batches = fed.iterate_in_order(4) if in_order else fed.iterate_shuffled(4, order, nothing)
        for batch in batches:
            compute_on(backend, batch, seen)
        backend.compute.drain()
        assert len(seen) == fed.count_steps(4)
        for got_x, got_y in seen:
            assert torch.equal(got_x, torch.from_numpy(x)[got_y])
        assert sorted(torch.cat([got_y for _, got_y in seen]).tolist()) == list(range(rows))
    # The first set of buffers was written again, for which its copy had to be waited for.
    assert fed.copy_s == pytest.approx(0.002)
    assert not threads()


def test_copies_are_ahead_of_the_steps_and_the_host_is_not_far_ahead_of_the_device(backend) -> None:
    fed = pinned(np.zeros((40, 3), np.float32), np.arange(40))
    marks: list[str] = []
    for number, batch in enumerate(
        fed.iterate_shuffled(4, torch.arange(40), marks.append), start=1
    ):
        compute_on(backend, batch, [])
        assert marks == ["data_wait", "h2d"] * number
        assert backend.compute.given - backend.compute.done <= 4
    assert backend.compute.given == 10 and backend.compute.done >= 6


def test_an_iteration_that_ends_early_leaves_no_copy_under_way(backend) -> None:
    fed = pinned(np.zeros((40, 3), np.float32), np.arange(40))
    batches = fed.iterate_shuffled(4, torch.arange(40), nothing)
    next(batches)
    batches.close()
    assert not threads()
    backend.compute.drain()  # whatever is computed next comes after the copies
    assert not [item for item in backend.side.work if not isinstance(item, Token)]
    seen: list = []
    for batch in fed.iterate_shuffled(4, torch.arange(40), nothing):
        compute_on(backend, batch, seen)
    backend.compute.drain()
    assert torch.cat([y for _, y in seen]).tolist() == list(range(40))


def test_two_iterations_at_once_have_buffers_of_their_own(backend) -> None:
    fed = pinned(np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12))
    pairs: list = []
    both = fed.iterate_shuffled(3, torch.arange(12), nothing), fed.iterate_in_order(3)
    for first, second in zip(*both, strict=True):
        pairs.append([])
        compute_on(backend, (*first, *second), pairs[-1])
    backend.compute.drain()
    for ((x1, y1, x2, y2),) in pairs:
        assert torch.equal(x1, x2) and torch.equal(y1, y2)


def test_pinned_memory_is_kept_between_epochs_and_dropped_on_close(backend) -> None:
    fed = pinned(np.zeros((12, 2), np.float32), np.arange(12))
    list(fed.iterate_shuffled(3, torch.arange(12), nothing))
    first = weakref.ref(fed._idle)
    list(fed.iterate_shuffled(2, torch.arange(12), nothing))
    assert fed._idle is first(), "a smaller batch fits"
    list(fed.iterate_shuffled(4, torch.arange(12), nothing))
    assert first() is None, "a larger one does not"
    kept = weakref.ref(fed._idle)
    fed.close()
    assert kept() is None


def test_an_error_of_the_disk_reaches_the_loop_from_pinned_buffers_too(backend) -> None:
    fed = pinned(np.zeros((20, 3), np.float32), np.arange(20))
    fed._arrays = (fed._arrays[0].view(Broken), fed._arrays[1])
    with pytest.raises(OSError, match="Input/output error"):
        for _ in fed.iterate_shuffled(5, torch.arange(20), nothing):
            pass
    assert not threads()


def test_the_order_follows_the_seed_and_the_epoch_alone() -> None:
    torch.manual_seed(5)
    first = draw_row_order(50, seed=1, epoch=1)
    torch.manual_seed(6)
    assert torch.equal(first, draw_row_order(50, seed=1, epoch=1))
    assert not torch.equal(first, draw_row_order(50, seed=1, epoch=2))
    assert not torch.equal(first, draw_row_order(50, seed=2, epoch=1))
    draw_row_order(5, seed=2**63 - 1, epoch=10**6)


@pytest.mark.parametrize("in_order", [False, True])
def test_where_there_is_room_for_one_batch_they_are_sent_one_by_one(
    backend, monkeypatch, in_order
) -> None:
    """Sending was tried once, with the batch before still there: the run ended."""
    x = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
    fed, real, there, refused = pinned(x, np.arange(23)), prefetch.PinnedStaging._send, [], []

    def send(lane, filled):
        if any(part() is not None for part in there):
            refused.append(len(there))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        sent = real(lane, filled)
        there.extend(weakref.ref(part) for part in sent.parts)
        return sent

    monkeypatch.setattr(prefetch.PinnedStaging, "_send", send)
    for epoch in range(2):
        seen: list = []
        order = draw_row_order(23, seed=0, epoch=epoch)
        for batch in (
            fed.iterate_in_order(4) if in_order else fed.iterate_shuffled(4, order, nothing)
        ):
            compute_on(backend, batch, seen)
            backend.compute.drain()
            del batch
        for got_x, got_y in seen:
            assert torch.equal(got_x, torch.from_numpy(x)[got_y])
        assert sorted(torch.cat([got_y for _, got_y in seen]).tolist()) == list(range(23))
    assert len(refused) == 1, "it is learnt once"
    assert not threads()


def test_a_batch_that_never_finds_room_ends_the_reading(backend, monkeypatch) -> None:
    def send(lane, filled):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(prefetch.PinnedStaging, "_send", send)
    fed = pinned(np.zeros((12, 2), np.float32), np.arange(12))
    with pytest.raises(torch.OutOfMemoryError, match="2.00 MiB"):
        list(fed.iterate_in_order(4))
    assert not threads()


@pytest.mark.parametrize("at", [1, 2, 5, 6])
def test_a_batch_sent_ahead_can_be_given_back_and_comes_all_the_same(
    backend, monkeypatch, at
) -> None:
    """A step with room for its own batch only ran out of memory beside the next one."""
    x = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
    fed, seen, given_back, sent = pinned(x, np.arange(23)), [], [], []
    real = prefetch.PinnedStaging._send
    monkeypatch.setattr(prefetch.PinnedStaging, "_send", lambda *a: sent.append(1) or real(*a))
    assert not fed.give_back(), "nothing is read yet"
    fed._is_ahead = True
    for number, batch in enumerate(fed.iterate_shuffled(4, torch.arange(23), nothing), start=1):
        if number == at:
            before = len(sent)
            given_back += [fed.give_back(), fed.give_back()]
        compute_on(backend, batch, seen)
    backend.compute.drain()
    assert given_back == [True, False]
    assert before == min(6, at + 1) and len(sent) == (6 if at == 6 else 7)
    assert torch.equal(torch.cat([y for _, y in seen]), torch.arange(23))
    assert torch.equal(torch.cat([x for x, _ in seen]), torch.from_numpy(x))
