"""stacked_values: where a stack of per-iteration values is found, or how it is made."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.passes.loops.stacked_values import StackedValues

aten = torch.ops.aten


class Graph:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: list[Tensor] = []
        self._mode = FakeTensorMode()

    def input(self, *shape: int) -> fx.Node:
        self.inputs.append(torch.randn(shape))
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["val"] = self._mode.from_tensor(self.inputs[-1])
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        with self._mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda each: each.meta["val"]))
        return node

    def end(self, *results: fx.Node) -> fx.Node:
        return self.graph.output(list(results))

    def run(self, result: fx.Node) -> Tensor:
        self.graph.output_node().args = (result,)
        self.graph.lint()
        return fx.GraphModule(nn.Module(), self.graph)(*self.inputs)

    def targets(self) -> list[str]:
        return [str(n.target) for n in self.graph.nodes if n.op == "call_function"]


def stacked(g: Graph, values: list[fx.Node], end: fx.Node) -> tuple[list[str], Tensor]:
    """The operators that a stack takes, and its value."""
    before = len(g.targets())
    values_of = StackedValues(g.graph)
    plan = values_of.plan(tuple(values), end, frozenset([end]))
    node = values_of.make(plan, end)
    added = len(g.targets()) - before
    names = [str(n.target).removeprefix("aten.") for n in g.graph.nodes if n.op == "call_function"]
    return names[before : before + added], g.run(node)


def test_slices_of_one_tensor_are_its_view() -> None:
    g = Graph()
    x = g.input(2, 6, 3)
    slices = [g.call(aten.select.int, x, 1, at) for at in range(1, 5)]
    operators, value = stacked(g, slices, g.end(*slices))
    assert operators == ["slice.Tensor", "permute.default"]
    assert torch.equal(value, g.inputs[0].permute(1, 0, 2)[1:5])


def test_all_slices_along_the_first_dimension_are_the_tensor_itself() -> None:
    g = Graph()
    x = g.input(4, 3)
    slices = [g.call(aten.select.int, x, 0, at) for at in range(4)]
    operators, value = stacked(g, slices, g.end(*slices))
    assert operators == []
    assert torch.equal(value, g.inputs[0])


def test_items_of_unbind_are_slices() -> None:
    g = Graph()
    x = g.input(2, 4)
    unbound = g.call(aten.unbind.int, x, 1)
    items = [g.call(operator.getitem, unbound, at) for at in range(4)]
    operators, value = stacked(g, items, g.end(*items))
    assert operators == ["permute.default"]
    assert torch.equal(value, g.inputs[0].t())


def test_a_value_and_slices_are_concatenated() -> None:
    """The state that a loop begins with, and what it was at later iterations."""
    g = Graph()
    first, x = g.input(3), g.input(5, 3)
    values = [first, *(g.call(aten.select.int, x, 0, at) for at in range(4))]
    operators, value = stacked(g, values, g.end(*values))
    assert operators == ["unsqueeze.default", "slice.Tensor", "cat.default"]
    assert torch.equal(value, torch.stack([g.inputs[0], *g.inputs[1][:4]]))


def test_values_from_many_tensors_are_copied_into_a_stack() -> None:
    g = Graph()
    values = [g.input(3) for _ in range(5)]
    operators, value = stacked(g, values, g.end(*values))
    assert operators == ["cat.default", "view.default"]
    assert torch.equal(value, torch.stack(g.inputs))


def products_of_slices(g: Graph) -> list[fx.Node]:
    x, y = g.input(4, 3), g.input(4, 3)
    return [
        g.call(
            aten.mul.Tensor,
            g.call(aten.select.int, x, 0, at),
            g.call(aten.select.int, y, 0, at),
        )
        for at in range(4)
    ]


def test_an_operator_that_no_one_else_reads_is_batched() -> None:
    """Its operands are slices; the iterations' own operators are then dead."""
    g = Graph()
    products = products_of_slices(g)
    operators, value = stacked(g, products, g.end(*products))
    assert operators == ["mul.Tensor"]
    assert torch.equal(value, g.inputs[0] * g.inputs[1])


def test_an_operator_that_others_read_is_not_run_twice() -> None:
    g = Graph()
    products = products_of_slices(g)
    for each in products:
        g.call(aten.neg.default, each)
    operators, value = stacked(g, products, g.end(*products))
    assert "mul.Tensor" not in operators
    assert torch.equal(value, g.inputs[0] * g.inputs[1])


def test_no_stack_is_larger_than_the_largest_tensor() -> None:
    g = Graph()
    values = [g.input(3) for _ in range(5)]
    g.end(*values)
    known = StackedValues(g.graph)
    assert known.fits(tuple(values[:1]))
    assert not known.fits(tuple(values[:2]))
