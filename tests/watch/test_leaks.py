"""That what was given back is measured, and that who still holds something is named."""

import gc
import sys
import threading
import types
import weakref
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headroom.watch import leaks, memory_meter
from headroom.watch.holders import GRADIENT, LiveTensor, find_live_tensors, find_storages
from headroom.watch.leaks import NO_HOLDER, release_device_memory, take_baseline
from headroom.watch.memory_meter import count_allocated_bytes
from headroom.watch.out_of_memory import clear_frames

CPU = torch.device("cpu")
KEPT = []


@pytest.fixture(autouse=True, scope="module")
def a_small_heap():
    """Takes all objects there are out of the collector's sight, to make its passes short."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def my_hooks():
    """A module made now, which the collector therefore sees; it holds KEPT."""
    global KEPT
    module = types.ModuleType("my_hooks")
    module.KEPT = KEPT = []
    yield module
    KEPT.clear()
    gc.collect()


@pytest.fixture
def before():
    return take_baseline(CPU).bytes


def held_by(before):
    """Who holds the one leak there is."""
    facts = release_device_memory(CPU, baseline_bytes=before)
    assert not facts.ok
    (owner,) = facts.owners
    return owner.held_by


class Model:
    def __init__(self, tensor):
        self.kept = tensor


def test_nothing_kept_is_ok(before):
    nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
    facts = release_device_memory(CPU, baseline_bytes=before)
    assert (facts.ok, facts.leaked_bytes, facts.residual_bytes, facts.owners) == (True, 0, 0, ())
    assert facts.after_bytes == facts.baseline_bytes == before


def test_release_collects_a_cycle_and_tells_what_it_freed(before):
    model = Model(torch.ones(1000))
    model.me = model
    del model
    facts = release_device_memory(CPU, baseline_bytes=before)
    assert facts.ok
    assert (facts.before_bytes - before, facts.released_bytes) == (4000, 4000)


def test_what_was_released_is_less_by_what_is_still_there(before):
    kept = torch.ones(500)
    model = Model(torch.ones(1000))
    model.me = model
    del model
    facts = release_device_memory(CPU, baseline_bytes=before + 2000)
    assert (facts.after_bytes - before, facts.released_bytes) == (kept.nbytes, 4000)


def test_a_leak_is_described(before):
    KEPT.append(torch.ones(3, 5, dtype=torch.float64))
    facts = release_device_memory(CPU, baseline_bytes=before)
    (owner,) = facts.owners
    assert (owner.kind, owner.shape, owner.dtype, owner.bytes) == ("Tensor", (3, 5), "float64", 120)
    assert owner.held_by == "list in module my_hooks, name 'KEPT'"
    assert (facts.leaked_bytes, facts.after_bytes, facts.residual_bytes) == (120, before + 120, 0)


def test_a_module_global_is_named(before, my_hooks):
    my_hooks.kept = torch.ones(2)
    assert held_by(before) == "module my_hooks, name 'kept'"


def test_a_dict_in_a_dict_is_named_by_its_keys(before):
    KEPT.append({"runs": {7: torch.ones(2)}})
    found = held_by(before)
    assert found == "dict, key 7 in dict, key 'runs' in list in module my_hooks, name 'KEPT'"


def test_an_attribute_is_named(before):
    KEPT.append(Model(torch.ones(2)))
    assert held_by(before).startswith("attribute 'kept' of Model in list in module")


def test_a_class_attribute_is_named(before):
    class Cached:
        cache = torch.ones(2)

    found = held_by(before)
    assert found.startswith(f"attribute 'cache' of class {__name__}.test_a_class_attribute")
    assert found.endswith("Cached")


def test_a_closure_is_named(before):
    def make():
        kept = torch.ones(2)
        return lambda: kept

    KEPT.append(make())
    assert "cell in tuple in function test_a_closure_is_named" in (words := held_by(before))
    assert words.endswith("in list in module my_hooks, name 'KEPT'")


def test_a_default_argument_is_named(before):
    def logged(rows=torch.ones(2)):  # noqa: B008
        return rows

    assert held_by(before).startswith("tuple in function test_a_default_argument_is_named")


def test_a_forward_hook_that_keeps_outputs_is_named(before):
    model = nn.Linear(2, 2)

    def watch():
        seen = []
        model.register_forward_hook(lambda module, args, out: seen.append(out.detach()))

    watch()
    model(torch.ones(1, 2))
    names = [owner.held_by for owner in release_device_memory(CPU, baseline_bytes=before).owners]
    assert any(
        "function test_a_forward_hook_that_keeps" in n and "'_forward_hooks' of Linear" in n
        for n in names
    )


def test_a_local_of_a_running_function_is_named_and_not_kept_by_looking(before):
    rows = torch.ones(2)
    assert "local 'rows' of function test_a_local_of_a_running_function" in held_by(before)
    alive = weakref.ref(rows)
    del rows
    assert alive() is None


def test_what_locals_returned_is_left_as_it_was(before):
    rows = torch.ones(2)
    mine = locals()
    held_by(before)
    assert mine["rows"] is rows


def test_a_suspended_generator_is_named(before):
    def batches():
        rows = torch.ones(2)
        yield len(rows)

    it = batches()
    next(it)
    assert held_by(before).startswith("generator in local 'it' of function test_a_suspended")


def test_an_exceptions_traceback_is_named_with_frame_and_local(before):
    def train_step():
        batch = torch.ones(2)
        raise RuntimeError(f"failed on {len(batch)}")

    with pytest.raises(RuntimeError) as caught:
        train_step()
    KEPT.append(caught.value)
    words = held_by(before)
    assert words.startswith("local 'batch' of the kept frame test_an_exceptions_traceback_is_named")
    assert "train_step (test_leaks.py:" in words
    assert "traceback in RuntimeError in list in module my_hooks, name 'KEPT'" in words
    clear_frames(caught.value)
    assert release_device_memory(CPU, baseline_bytes=before).ok


def test_an_object_that_holds_its_parent_is_climbed_out_of(before):
    parent, child = Model(None), Model(torch.ones(2))
    parent.child, child.parent = child, parent
    KEPT.append(parent)
    del parent, child
    assert "module my_hooks, name 'KEPT'" in held_by(before)


def test_a_model_is_named_by_its_parts_and_gradients(before):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False)))
    model(torch.ones(1, 2)).sum().backward()
    KEPT.append(model)
    del model
    owners = release_device_memory(CPU, baseline_bytes=before).owners
    path = "'weight' of Linear in '0' of Sequential in '0' of Sequential in list in module my_hooks"
    assert [o.kind for o in owners if o.held_by.startswith(path)] == ["Parameter"]
    assert [o.kind for o in owners if o.held_by.startswith("Parameter (2, 2) as its gradient")]
    assert len(owners) == 2


def test_what_a_kept_loss_keeps_for_its_backward_is_counted_and_named(before):
    x = torch.randn(8, 8, requires_grad=True)
    KEPT.append((x.exp() * x.sin()).sum())
    del x
    facts = release_device_memory(CPU, baseline_bytes=before)
    assert facts.leaked_bytes == 3 * 256 + 4
    said = [o.held_by for o in facts.owners if o.bytes == 256]
    assert (
        said
        == ["Tensor () for its backward pass, held by list in module my_hooks, name 'KEPT'"] * 3
    )


def test_looking_at_a_graph_recomputes_nothing(before):
    calls = []

    def block(x):
        calls.append(1)
        return x.exp().sin()

    x = torch.ones(4, requires_grad=True)
    loss = checkpoint(block, x, use_reentrant=False).sum()
    assert not release_device_memory(CPU, baseline_bytes=before).ok
    assert len(calls) == 1
    loss.backward()


def test_a_tensor_of_another_thread_is_a_leak_though_nothing_names_it(before):
    go, ready = threading.Event(), threading.Event()

    def work():
        mine = torch.ones(2)
        ready.set()
        go.wait(30)
        del mine

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(30)
    found = held_by(before)
    go.set()
    thread.join()
    assert found == NO_HOLDER or "local 'mine' of function" in found


def test_what_nobody_holds_is_described_by_the_most_direct_way_to_it(monkeypatch):
    kept, x = torch.ones(2, 2), torch.ones(4, requires_grad=True)
    storage = kept.untyped_storage()
    ways = [LiveTensor(kept.view(4), storage, GRADIENT, x), LiveTensor(kept, storage)]
    monkeypatch.setattr(leaks, "find_live_tensors", lambda device: list(ways))
    monkeypatch.setattr(leaks, "_baselines", {})
    monkeypatch.setattr(leaks.Holders, "find_holder", lambda holders, of: None)
    (owner,) = release_device_memory(CPU, baseline_bytes=0).owners
    assert (owner.shape, owner.bytes, owner.held_by) == ((2, 2), 16, NO_HOLDER)


def test_the_largest_owners_are_named_first_and_at_most_ten():
    gc.collect()
    before = take_baseline(CPU).bytes
    KEPT.extend(torch.ones(n) for n in range(1, 31))
    facts = release_device_memory(CPU, baseline_bytes=before)
    assert [o.shape for o in facts.owners] == [(n,) for n in range(30, 20, -1)]
    assert facts.leaked_bytes == 4 * sum(range(1, 31))


def test_tensors_of_before_are_no_leak_and_hide_none():
    """What is freed meanwhile must not pay for what is kept."""
    old = [torch.ones(1000), torch.ones(10)]
    gc.collect()
    before = take_baseline(CPU).bytes
    del old[0]
    KEPT.append(torch.ones(5))
    facts = release_device_memory(CPU, baseline_bytes=before)
    assert facts.after_bytes < before
    assert (facts.leaked_bytes, facts.residual_bytes) == (20, 0)
    assert [o.shape for o in facts.owners] == [(5,)]


def test_a_view_of_an_old_tensor_is_no_leak():
    old = torch.ones(100)
    before = take_baseline(CPU).bytes
    KEPT.append(old[:50])
    assert release_device_memory(CPU, baseline_bytes=before).ok


def test_a_new_tensor_at_an_old_address_is_a_leak():
    old = torch.ones(100)
    before = take_baseline(CPU).bytes
    del old
    KEPT.append(torch.ones(100))
    assert release_device_memory(CPU, baseline_bytes=before).leaked_bytes == 400


def test_a_baseline_of_another_process_is_known_by_its_size_only(monkeypatch):
    old = torch.ones(100)
    gc.collect()
    in_use = count_allocated_bytes(CPU)
    monkeypatch.setattr(leaks, "_baselines", {})
    assert release_device_memory(CPU, baseline_bytes=in_use).ok
    KEPT.append(torch.ones(5))
    facts = release_device_memory(CPU, baseline_bytes=in_use)
    assert (facts.leaked_bytes, facts.ok) == (20, False)
    assert len(old) == 100


def test_a_baseline_keeps_no_memory():
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    kept = take_baseline(CPU)
    del tensor
    assert alive() is None
    assert "before" not in repr(kept)


def test_facts_hold_plain_values_only(before):
    KEPT.append(torch.ones(2))
    facts = release_device_memory(CPU, baseline_bytes=before)
    KEPT.clear()
    assert release_device_memory(CPU, baseline_bytes=before).ok
    assert "Tensor" in repr(facts)


def test_a_hundred_trainings_of_which_half_fail_leave_the_baseline(before):
    def train(fail):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            if fail and step == 2:
                raise RuntimeError(f"failed at {loss.item()}")
            optimizer.step()

    for run in range(100):
        try:
            train(run % 2)
        except RuntimeError as error:
            clear_frames(error)
            KEPT.append(error)  # as Prefect does
    facts = release_device_memory(CPU, baseline_bytes=before)
    assert facts.owners == ()
    assert facts.after_bytes == before
    assert len(KEPT) == 50


def test_release_does_not_import_the_compiler():
    before = take_baseline(CPU).bytes
    here = "torch._dynamo" in sys.modules
    release_device_memory(CPU, baseline_bytes=before)
    assert ("torch._dynamo" in sys.modules) == here


class Wrapper(torch.Tensor):
    """Claims a size, holds no memory, and refuses every operation."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ValueError("nobody may ask")


def in_use():
    return sum({live.key: live.bytes for live in find_live_tensors(CPU)}.values())


def test_odd_objects_are_passed_by_without_a_question():
    class Touchy:
        @property
        def __class__(self):
            raise ValueError("nobody may ask")

        def __getattr__(self, name):
            raise ValueError("nobody may ask")

    target = Model(None)
    odd = [Touchy(), MagicMock(), MagicMock(spec=torch.Tensor), weakref.proxy(target)]
    odd += [
        nn.LazyLinear(3),
        torch.empty(3, device="meta"),
        torch.empty(0),
        torch.ones(3).to_mkldnn(),
    ]
    gc.collect()
    start = in_use()
    odd.append(Wrapper(torch.ones(4)))
    assert in_use() - start == 16


def test_fake_and_functorch_tensors_hold_nothing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    gc.collect()
    start = in_use()
    with FakeTensorMode():
        fake = [torch.empty(4), torch.empty(4, device="cuda")]
    assert in_use() == start
    assert all(not find_storages(f) for f in fake)
    seen = []
    torch.func.vmap(lambda row: seen.append(len(find_storages(row))) or row)(torch.ones(3, 2))
    assert seen == [0]


def test_sparse_tensors_count_their_parts():
    gc.collect()
    start = in_use()
    sparse = torch.eye(4).to_sparse()
    assert in_use() - start == 4 * 4 + 2 * 4 * 8
    assert sparse.is_sparse


def test_a_gradient_that_nobody_looked_at_counts():
    x = torch.ones(4, requires_grad=True)
    gc.collect()
    start = in_use()
    x.sum().backward()
    assert in_use() - start == 16


# With the books of a device that are written down


@pytest.fixture
def books(monkeypatch):
    """What an allocator and a driver tell; nothing is held by a tensor."""
    told = types.SimpleNamespace(
        allocated=100, reserved=200, pools=20, pinned=30, free=700, total=1000, broken=False
    )

    def space():
        return types.SimpleNamespace(free_bytes=told.free, total_bytes=told.total)

    def source(device):
        read = {"allocated": told.allocated, "reserved": told.reserved}
        found = {name: size for name, size in read.items() if size is not None}
        return types.SimpleNamespace(
            read=lambda: found, read_space=lambda: None if told.total is None else space()
        )

    monkeypatch.setattr(leaks, "_baselines", {})
    monkeypatch.setattr(leaks, "make_allocator", source)
    monkeypatch.setattr(memory_meter, "make_allocator", source)
    monkeypatch.setattr(leaks, "find_live_tensors", lambda device: [])
    monkeypatch.setattr(leaks, "release_cached_memory", lambda device: None)
    monkeypatch.setattr(leaks, "count_pool_bytes", lambda device: told.pools)
    monkeypatch.setattr(leaks, "count_pinned_bytes", lambda device: told.pinned)
    monkeypatch.setattr(leaks, "is_broken", lambda device: told.broken)
    return told


@pytest.mark.parametrize(
    ("after", "ok", "reserved", "kept"),
    [
        ({}, True, 0, {}),
        ({"allocated": 60, "reserved": 80, "pools": 0, "pinned": 0, "free": 900}, True, 0, {}),
        ({"reserved": 201}, False, 1, {}),
        ({"allocated": 101}, True, 0, {"workspaces of libraries": 1}),
        ({"allocated": 101, "reserved": 250}, True, 50, {"workspaces of libraries": 1}),
        ({"pools": 21}, False, 0, {"private pools of graphs": 1}),
        ({"pinned": 31}, True, 0, {"pinned host memory": 1}),
        ({"pinned": None}, True, 0, {}),
        ({"free": 699}, True, 0, {"the driver's context, or other processes": 1}),
        ({"reserved": 250, "free": 650}, False, 50, {}),
        (
            {"reserved": 250, "free": 643},
            False,
            50,
            {"the driver's context, or other processes": 7},
        ),
        ({"free": None}, True, 0, {}),
        ({"total": None}, True, 0, {}),
        ({"reserved": None}, True, None, {}),
    ],
)
def test_what_is_taken_above_the_baseline_is_told_to_the_byte(books, after, ok, reserved, kept):
    """Reserved memory is excused by a residual, which pins its segment; a private pool by none."""
    before = take_baseline("cuda:0").bytes
    assert before == 100
    vars(books).update(after)
    facts = release_device_memory("cuda:0", baseline_bytes=before)
    assert (facts.ok, facts.reserved_bytes) == (ok, reserved)
    assert {one.name: one.bytes for one in facts.kept} == kept
    assert (facts.leaked_bytes, facts.owners) == (0, ())
    assert facts.residual_bytes == max(0, books.allocated - 100)
    assert (facts.before_bytes, facts.after_bytes) == (books.allocated, books.allocated)


def test_what_a_baseline_was_not_told_is_kept_by_nobody(books):
    books.free = None
    before = take_baseline("cuda:0").bytes
    books.free, books.total = 1, 10**9
    assert release_device_memory("cuda:0", baseline_bytes=before).kept == ()


def test_of_a_baseline_of_another_process_pools_count_and_nothing_reserved_does(books):
    books.reserved = 10**6
    facts = release_device_memory("cuda:0", baseline_bytes=90)
    assert (facts.ok, facts.reserved_bytes, facts.kept, facts.residual_bytes) == (
        False,
        None,
        (),
        10,
    )
    books.pools = 1
    assert not release_device_memory("cuda:0", baseline_bytes=90).ok
    books.pools = 0
    assert release_device_memory("cuda:0", baseline_bytes=90).ok
    less = release_device_memory("cuda:0", baseline_bytes=1000)
    assert (less.ok, less.leaked_bytes, less.residual_bytes) == (True, 0, 0)
    take_baseline("cuda:0")
    assert release_device_memory("cuda:0", baseline_bytes=99).reserved_bytes is None, "not that one"
    assert release_device_memory("cuda:0", baseline_bytes=100).reserved_bytes == 0


def test_what_a_run_held_at_its_end_counts_as_released(books):
    before = take_baseline("cuda:0").bytes
    facts = release_device_memory("cuda:0", baseline_bytes=before, held_bytes=500)
    assert (facts.before_bytes, facts.released_bytes) == (500, 400)
    facts = release_device_memory("cuda:0", baseline_bytes=before, held_bytes=50)
    assert (facts.before_bytes, facts.released_bytes) == (100, 0)
    assert release_device_memory("cuda:0", baseline_bytes=before).before_bytes == 100
    books.allocated = 0
    assert release_device_memory("cuda:0", baseline_bytes=before).before_bytes == 0


def test_what_a_cache_gave_back_is_no_longer_in_use(books, monkeypatch):
    before = take_baseline("cuda:0").bytes
    books.allocated = 300

    def give_back(device):
        books.allocated = 100

    monkeypatch.setattr(leaks, "release_cached_memory", give_back)
    facts = release_device_memory("cuda:0", baseline_bytes=before)
    assert (facts.before_bytes, facts.after_bytes, facts.released_bytes) == (300, 100, 200)
    assert facts.residual_bytes == 0


def test_what_somebody_took_meanwhile_is_not_released_less(books, monkeypatch):
    before = take_baseline("cuda:0").bytes
    monkeypatch.setattr(
        leaks, "release_cached_memory", lambda device: vars(books).update(allocated=101)
    )
    assert release_device_memory("cuda:0", baseline_bytes=before).released_bytes == 0


def test_one_byte_is_a_leak_and_none_is_not(before):
    KEPT.append(torch.empty(0))
    assert release_device_memory(CPU, baseline_bytes=before).ok
    KEPT.append(torch.ones(1, dtype=torch.int8))
    assert release_device_memory(CPU, baseline_bytes=before).leaked_bytes == 1


def test_an_allocator_that_tells_nothing_has_nothing_in_use(books):
    books.allocated = None
    assert take_baseline("cuda:0").bytes == 0


def test_from_nothing_all_is_above(books):
    books.reserved, books.pinned = 0, None
    before = take_baseline("cuda:0").bytes
    books.reserved, books.pinned = 5, 7
    facts = release_device_memory("cuda:0", baseline_bytes=before)
    assert facts.reserved_bytes == 5
    assert [(one.name, one.bytes) for one in facts.kept] == [("pinned host memory", 7)]


def test_a_storage_that_grew_in_its_place_leaks_what_it_grew_by():
    tensor = torch.ones(2)
    (live,) = [live for live in find_live_tensors(CPU) if live.tensor is tensor]
    known = take_baseline(CPU)
    known.before[live.key] = 3  # of its 8 bytes
    facts = release_device_memory(CPU, baseline_bytes=known.bytes)
    assert (facts.leaked_bytes, [owner.bytes for owner in facts.owners]) == (5, [5])


def test_of_a_broken_device_nothing_is_given_back(books):
    books.broken = True
    facts = release_device_memory("cuda:0", baseline_bytes=70)
    assert (facts.ok, facts.before_bytes, facts.after_bytes) == (False, 100, 100)
    assert (facts.residual_bytes, facts.leaked_bytes, facts.released_bytes) == (30, 0, 0)
    assert facts.broken.startswith("cuda:0 answers nothing but errors")
    assert release_device_memory("cuda:0", baseline_bytes=101).residual_bytes == 0
    books.allocated = None
    assert release_device_memory("cuda:0", baseline_bytes=0).before_bytes == 0


@pytest.mark.parametrize("clean_after", [0, 1, 2, 3, 9])
def test_garbage_is_collected_until_nothing_new_is_left_and_at_most_three_times(
    monkeypatch, clean_after
):
    """A collection does nothing while another thread's is under way."""
    collected, pauses, garbage = [], [], torch.ones(2)
    (live,) = [live for live in find_live_tensors(CPU) if live.tensor is garbage]

    def left(device):
        return [live] if len(collected) < clean_after else []

    monkeypatch.setattr(leaks, "find_live_tensors", left)
    monkeypatch.setattr(leaks, "_baselines", {})
    monkeypatch.setattr(leaks.gc, "collect", lambda: collected.append(1))
    monkeypatch.setattr(leaks.time, "sleep", pauses.append)
    facts = release_device_memory(CPU, baseline_bytes=0)
    assert len(collected) == min(3, clean_after) and facts.ok == (clean_after <= 3)
    assert pauses == [0.05] * (3 if clean_after > 3 else max(0, clean_after - 1))


@pytest.mark.parametrize(("frames", "resets"), [({}, 0), ({"total": 1}, 1)])
def test_the_compiler_is_reset_where_it_was_used(monkeypatch, frames, resets):
    calls = []
    utils = types.SimpleNamespace(counters={"frames": frames})
    dynamo = types.SimpleNamespace(utils=utils, reset=lambda: calls.append(1))
    monkeypatch.setitem(sys.modules, "torch._dynamo", dynamo)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    release_device_memory(CPU, baseline_bytes=take_baseline(CPU).bytes)
    assert len(calls) == resets
