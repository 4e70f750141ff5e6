"""Batches of any structure: cut by rows, and described in plain values."""

import torch

from headroom.base import nested

CPU = torch.device("cpu")


def test_a_structure_is_split_by_its_rows_and_described_in_plain_values() -> None:
    part = {"a": torch.arange(10).reshape(5, 2), "b": (torch.ones(3), "text"), "n": None}
    first, second, third = nested.split_batch(part, 2, whole=5)
    assert first["a"].tolist() == [[0, 1], [2, 3]] and third["a"].tolist() == [[8, 9]]
    assert second["b"][0] is part["b"][0] and second["b"][1] == "text"
    assert nested.split_batch(part, 5, whole=5)[0] is part
    again = nested.make_zeros(nested.describe_structure(part, 5), 2, device=CPU)
    assert again["a"].shape == (2, 2) and again["a"].dtype == torch.int64
    assert again["b"][0].shape == (3,) and again["b"][1] == "text" and again["n"] is None
    assert [name for name, _ in nested.find_named_tensors(part, "inputs")] == [
        "inputs['a']",
        "inputs['b'][0]",
    ]


def test_a_batch_with_a_dict_for_each_row_is_cut_by_rows() -> None:
    """The objects of the first image were taken for the rows of the batch."""
    targets = [{"boxes": torch.ones(many, 4)} for many in (3, 1, 2)]
    batch = {"x": torch.arange(3), "labels": targets}, targets
    assert nested.count_rows(targets) == 3
    first, last = nested.split_batch(batch, 2, whole=3)
    assert first[0]["x"].tolist() == [0, 1] and first[0]["labels"] == targets[:2]
    assert last[1] == targets[2:]
    made = nested.make_zeros(nested.describe_structure(batch, 3), 2, device=CPU)
    assert [row["boxes"].shape for row in made[1]] == [(3, 4), (3, 4)]
