"""A window of a run trained anew comes out the same, or what differs first is named. The run is
only read."""

import base64
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.comparison import bit_differences, verification
from headroom.settings.read_settings import ConfigError
from headroom.training.loop import StopRequest
from tests.comparison.recorded_runs import record_training
from tests.run_folders import append_lines, make_event, make_line


def train(folder: Path, *, deterministic: bool = True, end_step: Any = None) -> Path:
    """A run of twelve steps."""
    return record_training(
        folder,
        "cpu",
        model={"args": {"dropout": 0.2, "hidden": [8]}},
        train={"max_steps": 12, "log_every": 3, "deterministic": deterministic},
        checkpoint={"every": "5steps"},
        end_step=end_step,
    )


def hash_files(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file): sha256(file.read_bytes()).hexdigest() for file in files}


def test_an_honest_run_is_equal_and_is_only_read(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    before = hash_files(run)
    found = verification.verify_run(run, begin=0)
    assert found.difference is None and found.digest_steps == 12 and found.logged > 4
    assert hash_files(run) == before


def test_a_run_that_was_gone_on_with_twice_is_equal(tmp_path: Path) -> None:
    for steps in (4, 4, 99):
        goes_on = iter([True] * steps)
        run = record_training(
            tmp_path / "run",
            "cpu",
            model={"args": {"dropout": 0.2}},
            train={"max_steps": 12, "log_every": 1, "deterministic": True},
            check_stop=lambda left=goes_on: None if next(left, 0) else StopRequest("leaves"),
        )
    for begin in (None, 0):
        found = verification.verify_run(run, begin=begin)
        assert found.difference is None and found.end == 12
        assert found.digest_steps == found.end - found.begin


def test_what_the_end_tells_of_the_best_weights_is_no_other_step(tmp_path: Path) -> None:
    """An honest run whose best epoch was not its last was told to differ."""
    run = train(tmp_path / "run")
    append_lines(run, make_line({"val/loss": 99.0}, 12, unix_ms=2))
    assert verification.verify_run(run, begin=0).difference is None


@pytest.mark.parametrize(
    ("tensor", "bit"), [("weight/1.weight", 0), ("gradient/1.bias", 31), ("random/python", 7)]
)
def test_a_bit_flipped_in_the_training_anew_is_named(tmp_path: Path, tensor: str, bit: int) -> None:
    run = train(tmp_path / "run")
    flip = verification.Flip(7, tensor, 3, bit)
    first = verification.verify_run(run, begin=0, flip=flip).difference
    assert first is not None and (first.step, first.tensor) == (7, tensor)
    assert f"one bit (bit {bit})" in first.what and first.why == verification.AS_RECORDED


def test_a_bit_flipped_in_the_run_itself_is_named_by_its_digest(tmp_path: Path) -> None:
    lines = []

    def end_step(state: Any, step: int, loss: torch.Tensor) -> None:
        named = verification.name_tensors(state, loss)
        if step == 6:
            bit_differences.flip_bit(named, "optimizer/means/0", 5, 2)
        row = [int(verification.compute_digest(tensor)) for tensor in named.values()]
        rows = base64.b64encode(struct.pack(f"<{len(row)}q", *row)).decode()
        head = {"version": 2, "names": [*named], "environment": {}}
        lines.extend((head, {"steps": [step], "rows": rows}))

    run = train(tmp_path / "run", end_step=end_step)
    (run / "digests").mkdir()
    written = [make_event("digests", content, unix_ms=1) for content in lines]
    (run / "digests" / "first.jsonl").write_bytes(b"".join(written))
    first = verification.verify_run(run, begin=0).difference
    assert first is not None and (first.step, first.tensor) == (6, "optimizer/means/0")
    assert first.what.startswith("one bit: bit 2 of element [0, 5]")
    assert first.why == verification.ALIKE


def test_a_run_without_digests_is_compared_where_it_logged(tmp_path: Path) -> None:
    run = train(tmp_path / "run", deterministic=False)
    found = verification.verify_run(run, begin=0)
    assert found.difference is None and found.digest_steps == 0 and found.logged > 4
    flip = verification.Flip(4, "weight/1.weight", 0, 30)
    first = verification.verify_run(run, begin=0, flip=flip).difference
    assert first is not None and first.tensor in ("train/loss", "train/grad_norm")
    assert first.why == verification.AS_RECORDED


NETS = """
import torch
from torch import nn

class Puts(nn.Module):
    def __init__(self, begins):
        super().__init__()
        self.net, self.begins = nn.Linear(64, 10), begins
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        x = self.net(x.flatten(1))
        self.calls += self.training
        if self.training and self.calls > self.begins:
            x = x.clone()
            x[:, torch.tensor([0, 1])] = x[:, 2:4]
        return x

def puts(input_shape, outputs): return Puts(0)
def puts_later(input_shape, outputs): return Puts(5)
"""


def train_net(folder: Path, net: str) -> Path:
    """A run by an operation that need not come out the same."""
    name = f"verified_nets:{net}"
    return record_training(
        folder, "cpu", model={"name": name}, train={"max_steps": 12, "log_every": 2}
    )


def test_a_difference_by_operations_that_vary_is_told_with_both_values(
    tmp_path: Path, own: Callable[[str, str], None]
) -> None:
    own("verified_nets", NETS)
    run = train_net(tmp_path / "run", "puts")
    flip = verification.Flip(3, "weight/net.weight", 3, 20)
    found = verification.verify_run(run, begin=0, flip=flip)
    assert found.difference is not None and found.operations == ("index_put",)
    assert " was logged, and is " in found.difference.what


def test_an_operation_that_begins_later_is_named_where_it_may_be_the_cause(
    tmp_path: Path, own: Callable[[str, str], None]
) -> None:
    """Those of the first three steps alone were seen."""
    own("verified_nets", NETS)
    run = train_net(tmp_path / "run", "puts_later")
    later, earlier = (
        verification.verify_run(run, begin=0, flip=verification.Flip(step, "", 3, 5))
        for step in (9, 3)
    )
    assert later.operations == ("index_put",) and not earlier.operations


def test_a_flip_that_makes_it_diverge_is_a_difference(tmp_path: Path) -> None:
    """Without digests it was no answer, but a failure."""
    run = train(tmp_path / "run", deterministic=False)
    largest = verification.Flip(4, "weight/4.bias", 0, 30)  # the highest bit of its exponent
    first = verification.verify_run(run, begin=0, flip=largest).difference
    assert first is not None and first.why == verification.AS_RECORDED


def test_it_refuses_what_it_cannot_train_anew(tmp_path: Path) -> None:
    (tmp_path / "account").mkdir()
    with pytest.raises(ConfigError, match="it is no training of `flows.train`"):
        verification.verify_run(tmp_path / "account")
    run = train(tmp_path / "run")
    with pytest.raises(ConfigError, match="^--from: there is no checkpoint of step 4; "):
        verification.verify_run(run, begin=4)
    with pytest.raises(ConfigError, match="^--steps: nothing was recorded .* choose 3 or more"):
        verification.verify_run(train(tmp_path / "other", deterministic=False), begin=0, steps=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_each_single_bit_changes_the_digest_and_is_found_by_it(dtype: torch.dtype) -> None:
    for size, element, every in ((9, 0, 1), (9, 8, 1), (70_001, 51_000, 7)):
        whole = torch.arange(size).to(dtype)
        for bit in range(0, 8 * whole.element_size(), every):
            named = {"x": whole.clone()}
            bit_differences.flip_bit(named, "x", element, bit)
            digest = int(verification.compute_digest(named["x"]))
            told = bit_differences.explain_by_one_bit(whole, digest)
            assert told.startswith(f"one bit: bit {bit} of element [{element}], "), told
