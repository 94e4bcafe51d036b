"""Rewrites of single operators and pairs of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.graph import calls, outputs
from autosplit.passes.rewrites.peephole import (
    divide_backward_operators,
    drop_summed_dimensions,
    fold_transposes,
    half_precision_dropout,
)
from autosplit.passes.verify import verify
from tests.passes.graphs import ops, program_of
from tests.semantics.against_autograd import assert_equals_autograd
from tests.zoo import Made

# --- divide: one convolution_backward becomes two by its output mask ------------------------------


def masks(module: fx.GraphModule) -> list[list[bool]]:
    return [
        list(node.args[10])
        for node in calls(module.graph)
        if node.target is torch.ops.aten.convolution_backward.default
    ]


def test_divides_by_the_mask() -> None:
    program = program_of(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8, requires_grad=True))
    assert masks(program.joint) == [[True, True, True]]
    assert divide_backward_operators(program)
    assert masks(program.joint) == [[True, False, False], [False, True, True]]
    verify(program)
    assert not divide_backward_operators(program)


# --- sums: a bias's gradient has no dimension that a view drops -----------------------------------


def test_sums_drop_what_a_view_behind_them_drops() -> None:
    program = program_of(nn.Linear(3, 4), torch.randn(2, 3, requires_grad=True))
    assert drop_summed_dimensions(program)
    (total,) = [n for n in calls(program.joint.graph) if n.target is aten.sum.dim_IntList]
    assert total.args[1:] == ([0],)
    assert total.meta["val"].shape == (4,)
    assert ops(program.joint)["view"] == 0
    verify(program)
    assert not drop_summed_dimensions(program)


# --- dropout: the backward rounds its noise as autograd's does, in half precision on a CPU --------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_the_steps_of_autograd(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, dtype=dtype, requires_grad=True)
    program = program_of(nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.Dropout(0.1)), x)
    assert ops(program.joint)["native_dropout_backward"] == 1
    assert half_precision_dropout(program)
    assert ops(program.joint)["native_dropout_backward"] == 0
    verify(program)
    assert not half_precision_dropout(program)


# --- fold_transposes: pairs that cancel go, all others stay, and the bits are the same ------------


aten = torch.ops.aten


def views(program: SplitGraphs) -> list[str]:
    return [str(node.target) for node in calls(program.joint.graph)]


def chain(*steps: Callable[[fx.Graph, fx.Node], fx.Node]) -> tuple[SplitGraphs, list[fx.Node]]:
    """A graph that transposes its input, [2, 3, 4], step by step, and returns the negative."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=torch.empty(2, 3, 4, device="meta"), role=Role(Kind.INPUT, "x"))
    nodes = [x]
    for step in steps:
        nodes.append(step(graph, nodes[-1]))
        nodes[-1].meta["val"] = applied(nodes[-1])
    negative = graph.call_function(aten.neg.default, (nodes[-1],))
    negative.meta["val"] = applied(negative)
    graph.output([negative]).meta["roles"] = (Role(Kind.OUTPUT, "output"),)
    return SplitGraphs(fx.GraphModule(nn.Module(), graph)), nodes


def applied(node: fx.Node) -> Tensor:
    args = fx.node.map_arg(node.args, lambda each: each.meta["val"])
    return node.target(*args)


def permute(*order: int) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    return lambda graph, node: graph.call_function(aten.permute.default, (node, list(order)))


def transpose(one: int, other: int) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    return lambda graph, node: graph.call_function(aten.transpose.int, (node, one, other))


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ([transpose(0, 1), transpose(1, 0)], 0),
        ([transpose(-1, 1), transpose(1, 2)], 0),
        ([transpose(0, 2), permute(2, 1, 0)], 0),
        ([permute(1, 2, 0), permute(2, 0, 1)], 0),
        ([transpose(0, 1)] * 3, 1),
        ([transpose(0, 1)] * 4, 0),
        ([transpose(0, 1), transpose(1, 2)], 2),
        ([permute(1, 2, 0), permute(1, 2, 0)], 2),
    ],
)
def test_pairs_that_cancel(steps: list[Callable[..., fx.Node]], left: int) -> None:
    program, _ = chain(*steps)
    expected = outputs(program.joint.graph)[0][1].meta["val"]
    assert fold_transposes(program) == (left < len(steps))
    assert len(views(program)) == left + 1
    program.joint.graph.lint()
    (negative,) = [value for _, value in outputs(program.joint.graph)]
    found = applied(negative)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())


def test_a_scalar_has_no_dimensions_to_exchange() -> None:
    model = Made(lambda _, x: torch.transpose(x.sum().transpose(0, -1), 0, -1) * 2)
    assert_equals_autograd(model, [(torch.randn(3, requires_grad=True),)] * 2)
