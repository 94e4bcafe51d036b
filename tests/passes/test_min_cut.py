"""min_cut on graphs small enough to cut by hand. Sizes are float32 elements times four."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autosplit.passes import PassError, Role
from autosplit.passes.graph import Kind
from autosplit.passes.min_cut import min_cut

aten = torch.ops.aten


class Build:
    """A graph in which every node's size is given."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, size: int, kind: Kind = Kind.INPUT) -> fx.Node:
        node = self.graph.placeholder(f"in{len(self.graph.nodes)}")
        node.meta["role"] = Role(kind, node.name)
        return self._sized(node, size)

    def op(self, size: int, *operands: fx.Node) -> fx.Node:
        return self._sized(self.graph.call_function(aten.cat.default, (list(operands),)), size)

    def view(self, operand: fx.Node) -> fx.Node:
        node = self.graph.call_function(aten.view.default, (operand, [-1]))
        node.meta["val"] = operand.meta["val"].view(-1)
        return node

    @staticmethod
    def _sized(node: fx.Node, size: int) -> fx.Node:
        node.meta["val"] = torch.empty(size, device="meta")
        return node


def test_carries_the_narrowest_value() -> None:
    b = Build()
    wide = b.input(100)
    narrow = b.op(3, wide)
    result = b.op(50, narrow)
    cut = min_cut(b.graph, early={wide}, late={result}, wanted=[result])
    assert cut.carried == [narrow]
    assert cut.late == {result}


def test_early_nodes_are_not_recomputed() -> None:
    b = Build()
    small = b.input(1)
    big = b.op(100, small)
    result = b.op(1, big)
    free = min_cut(b.graph, early={small}, late={result}, wanted=[result])
    assert (free.carried, free.late) == ([small], {big, result})
    pinned = min_cut(b.graph, early={small, big}, late={result}, wanted=[result])
    assert (pinned.carried, pinned.late) == ([big], {result})


def test_view_is_redone_and_its_base_carried() -> None:
    b = Build()
    base = b.input(10)
    view = b.view(base)
    result = b.op(1, view)
    cut = min_cut(b.graph, early={base}, late={result}, wanted=[result])
    assert (cut.carried, cut.late) == ([base], {view, result})


def test_two_views_cost_their_storage_once() -> None:
    """Carrying the base (10) beats carrying the sum of two smaller results (6 + 6)."""
    b = Build()
    base = b.input(10)
    first, second = b.op(6, b.view(base)), b.op(6, b.view(base))
    result = b.op(1, first, second)
    cut = min_cut(b.graph, early={base}, late={result}, wanted=[result])
    assert cut.carried == [base]


def test_parameters_are_free() -> None:
    b = Build()
    weight = b.input(1000, Kind.PARAMETER)
    cast = b.op(1, weight)
    result = b.op(1, cast)
    cut = min_cut(b.graph, early={weight}, late={result}, wanted=[result])
    assert cut.carried == [weight]


def test_a_node_is_not_computed_on_both_sides() -> None:
    """``shared`` is cheap to carry nowhere: its reader above the cut pulls it early."""
    b = Build()
    x = b.input(10)
    shared = b.op(8, x)
    above = b.op(1, shared)
    below = b.op(9, shared)
    result = b.op(1, above, below)
    cut = min_cut(b.graph, early={x, above}, late={result}, wanted=[result])
    computed_early = {node for root in cut.carried for node in _with_operands(root)}
    assert not cut.late & computed_early


def test_value_that_cannot_be_carried() -> None:
    b = Build()
    x = b.input(1)
    number = b.op(1, x)
    number.meta["val"] = 3
    result = b.op(1, number)
    with pytest.raises(PassError, match="neither be carried nor recomputed"):
        min_cut(b.graph, early={x, number}, late={result}, wanted=[result])


def _with_operands(node: fx.Node) -> set[fx.Node]:
    return {node}.union(*(_with_operands(operand) for operand in node.all_input_nodes))
