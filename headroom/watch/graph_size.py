"""Of what the graph of a forward pass is made: how many operations it has, and how many of them are
arithmetic. Nothing that the graph has saved is unpacked: shapes tell it all.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

LEAF = "torch::autograd::AccumulateGrad"  # a node of a graph that computes nothing
MOST_NODES = 20_000  # of a graph that are counted
MOST_OUTPUTS = 16  # tensors that a model gives which are looked at


class GraphSize(NamedTuple):
    """Nodes of a graph, and the multiply-adds of its products of matrices and its convolutions, in
    the forward pass: those that are known, so it may be more."""

    nodes: int
    multiply_adds: int


def measure_graph(outputs: Iterable[Tensor]) -> GraphSize:
    """Return the size of the graph that the gradients of these tensors are computed by."""
    open_nodes = [tensor.grad_fn for tensor in islice(outputs, MOST_OUTPUTS)]
    seen: set[Any] = set()
    while open_nodes and len(seen) < MOST_NODES:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_nodes += [before for before, _ in node.next_functions]
    inner = [node for node in seen if node.name() != LEAF]
    return GraphSize(len(inner), sum(map(_count_multiply_adds, inner)))


def _count_multiply_adds(node: Any) -> int:
    """Return those of one node; 0 where its shapes do not tell."""
    name = node.name()
    shapes = [tuple(one.shape) for one in getattr(node, "_input_metadata", ())]
    if name in ("AddmmBackward0", "MmBackward0") and shapes:
        sizes = getattr(node, "_saved_mat2_sym_sizes", None)
        return prod(shapes[0]) * int(sizes[0]) if sizes else 0
    if name == "ConvolutionBackward0" and shapes and len(node.next_functions) > 1:
        leaf = node.next_functions[1][0]
        weight = getattr(leaf, "variable", None)  # of shape (out, in, ...)
        return prod(shapes[0]) * prod(weight.shape[1:]) if weight is not None else 0
    return 0
