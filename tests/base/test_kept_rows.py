"""What is kept of the rows of an evaluation."""

import pytest
import torch

from headroom.base import scores
from headroom.base.scores import KeptRows, shrink_classes


@pytest.mark.parametrize(("most", "stride"), [(100, 1), (66, 1), (65, 2), (34, 2), (14, 5)])
@pytest.mark.parametrize("batch", [1, 4, 33])
def test_beyond_the_bound_every_so_many_rows_are_kept(
    monkeypatch: pytest.MonkeyPatch, most: int, stride: int, batch: int
) -> None:
    monkeypatch.setitem(scores.MOST_VALUES, "regression", most)
    outputs, targets = torch.arange(66.0).reshape(33, 2), torch.arange(33)
    kept = KeptRows("regression", 33)
    for rows in torch.arange(33).split(batch):
        kept.add(outputs[rows], targets[rows])
    found = kept.on_host()
    assert found is not None and found[0].numel() <= most
    assert torch.equal(found[1], targets[::stride]) and torch.equal(found[0], outputs[::stride])


def test_rows_beyond_those_that_were_told_of_are_no_reason_to_fail() -> None:
    kept = KeptRows("regression", 3)
    for _ in range(2):
        kept.add(torch.ones(2, 1), torch.ones(2, 1))
    found = kept.on_host()
    assert found is not None and len(found[0]) == len(found[1]) == 3
    assert KeptRows("regression", 3).on_host() is None


def test_classes_are_kept_in_as_few_bytes_as_they_need() -> None:
    assert shrink_classes(torch.tensor([2**15 - 1, -100]), 2**15).tolist() == [2**15 - 1, -100]
    assert shrink_classes(torch.tensor([0]), 2**15).dtype == torch.int16
    assert shrink_classes(torch.tensor([2**15]), 2**15 + 1).tolist() == [2**15]
