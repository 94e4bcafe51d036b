"""Stacks of what the iterations of a loop compute: how they are made, and with which bits."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.passes.loops.stacked_values import (
    Stacked,
    StackedValues,
    can_be_stacked,
    is_computation,
    on_stacks,
    stacked_arguments,
)

# --- Operators on stacks: the result has the bits of what the operator makes in each iteration ----


aten = torch.ops.aten
STEPS = 3


class Iterations:
    """A graph with the operator as one iteration calls it; tensors differ between iterations."""

    def __init__(self, target: Any, *args: Any, **kwargs: Any) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.values: dict[str, Tensor] = {}
        self.stacks: dict[fx.Node, fx.Node] = {}
        taken = [self._operand(arg) if isinstance(arg, Tensor) else arg for arg in args]
        self.node = self.graph.call_function(target, tuple(taken), kwargs)
        with self.mode:
            given = fx.node.map_arg(tuple(taken), lambda each: each.meta["val"])
            self.node.meta["val"] = target(*given, **kwargs)

    def _operand(self, stack: Tensor) -> fx.Node:
        """One iteration's value, and the stack of all."""
        name = f"x{len(self.values)}"
        self.values[name] = stack
        whole = self.graph.placeholder(name)
        whole.meta["val"] = self.mode.from_tensor(stack)
        one = self.graph.call_function(aten.select.int, (whole, 0, 0))
        one.meta["val"] = self.mode.from_tensor(stack[0])
        self.stacks[one] = whole
        return one

    def each(self) -> list[Tensor]:
        """What every iteration computes."""
        ones = {node: self.values[str(whole.target)] for node, whole in self.stacks.items()}
        found = []
        for step in range(STEPS):
            args = fx.node.map_arg(self.node.args, lambda n, step=step: ones[n][step])
            found.append(self.node.target(*args, **self.node.kwargs))
        return found

    def together(self) -> Tensor:
        """What comes of the stacks."""
        assert can_be_stacked(self.node)
        arguments = [
            Stacked(self.stacks[arg]) if isinstance(arg, fx.Node) else arg
            for arg in stacked_arguments(self.node)
        ]
        result = on_stacks(self.graph, self.node, arguments)
        assert result.meta["val"].shape == (STEPS, *self.node.meta["val"].shape)
        self.graph.output(result)
        return fx.GraphModule(nn.Module(), self.graph)(*self.values.values())


def stack(*shape: int) -> Tensor:
    return torch.randn(STEPS, *shape)


CASES: dict[str, tuple[Any, ...]] = {
    "pointwise": (aten.mul.Tensor, stack(2, 4), stack(2, 4)),
    "pointwise with a number": (aten.add.Scalar, stack(2, 4), 2.5),
    "pointwise that broadcasts": (aten.add.Tensor, stack(2, 4), stack(4)),
    "comparison": (aten.gt.Scalar, stack(2, 4), 0),
    "unsqueeze": (aten.unsqueeze.default, stack(2, 4), 1),
    "unsqueeze from the end": (aten.unsqueeze.default, stack(2, 4), -1),
    "squeeze": (aten.squeeze.dim, stack(2, 1, 4), 1),
    "select": (aten.select.int, stack(2, 4), -1, 2),
    "slice": (aten.slice.Tensor, stack(5, 4), 0, 1, 4, 2),
    "slice along the default": (aten.slice.Tensor, stack(5, 4)),
    "permute": (aten.permute.default, stack(2, 4, 3), [2, 0, -2]),
    "transpose": (aten.transpose.int, stack(2, 4, 3), 0, -1),
    "t": (aten.t.default, stack(2, 4)),
    "t of a vector": (aten.t.default, stack(4)),
    "expand": (aten.expand.default, stack(2, 1), [3, 2, 4]),
    "view": (aten.view.default, stack(2, 4), [8]),
    "bmm": (aten.bmm.default, stack(2, 4, 3), stack(2, 3, 5)),
    "bmm of a stack that must be copied": (
        aten.bmm.default,
        torch.randn(2, STEPS, 4, 3).transpose(0, 1),
        stack(2, 3, 5),
    ),
    "padding of one": (aten.select_backward.default, stack(2, 4), [2, 1, 4], 1, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_stack_of_results(name: str) -> None:
    iterations = Iterations(*CASES[name])
    expected = torch.stack(iterations.each())
    assert torch.equal(iterations.together(), expected)


def test_a_product_with_what_all_iterations_share() -> None:
    """An operand that is no stack is the same in every iteration."""
    weight = torch.randn(2, 3, 5)
    iterations = Iterations(aten.bmm.default, stack(2, 4, 3), torch.stack([weight] * STEPS))
    expected = torch.stack(iterations.each())
    left, right = iterations.node.args
    given = [Stacked(iterations.stacks[left]), right]
    result = on_stacks(iterations.graph, iterations.node, given)
    iterations.graph.output(result)
    found = fx.GraphModule(nn.Module(), iterations.graph)(*iterations.values.values())
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.exp.default, (stack(4),)),  # vectorized kernels round in another way
        (aten.sum.default, (stack(4),)),
        (aten.cumsum.default, (stack(4), 0)),
        (aten.select_backward.default, (stack(4), [2, 4], 0, 1)),  # with zeros around it
    ],
)
def test_operators_that_stay_apart(target: Any, args: tuple[Any, ...]) -> None:
    assert not can_be_stacked(Iterations(target, *args).node)


def test_views_are_no_computation() -> None:
    assert is_computation(Iterations(*CASES["bmm"]).node)
    assert is_computation(Iterations(*CASES["pointwise"]).node)
    assert not is_computation(Iterations(*CASES["transpose"]).node)


# --- stacked_values: where a stack of per-iteration values is found, or how it is made ------------


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
