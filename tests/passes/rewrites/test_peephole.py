"""Rewrites of single operators and pairs of them."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.graph import calls
from autosplit.passes.rewrites.peephole import (
    divide_backward_operators,
    drop_summed_dimensions,
    fold_transposes,
    half_precision_dropout,
)
from autosplit.passes.verify import verify
from tests.passes.graphs import ops, program_of

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


# --- fold_transposes: pairs that cancel go --------------------------------------------------------


aten = torch.ops.aten


@pytest.mark.parametrize(("steps", "left"), [(2, 0), (3, 1), (4, 0)])
@pytest.mark.parametrize("returned", [False, True])
def test_pairs_that_cancel(steps: int, left: int, returned: bool) -> None:
    """A returned value remains a separate tensor."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta.update(val=torch.empty(2, 3, device="meta"), role=Role(Kind.INPUT, "x"))
    for _ in range(steps):
        value = node.meta["val"].t()
        node = graph.call_function(aten.t.default, (node,))
        node.meta["val"] = value
    last = node if returned else graph.call_function(aten.neg.default, (node,))
    last.meta["val"] = node.meta["val"]
    graph.output([last]).meta["roles"] = (Role(Kind.OUTPUT, "output"),)
    program = SplitGraphs(fx.GraphModule(nn.Module(), graph))
    left = 2 - steps % 2 if returned else left
    assert fold_transposes(program) == (left < steps)
    assert len(graph.find_nodes(op="call_function", target=aten.t.default)) == left
    graph.lint()
    x = torch.randn(2, 3)
    expected = x if steps % 2 == 0 else x.t()
    (result,) = fx.GraphModule(nn.Module(), graph)(x)
    assert torch.equal(result, expected if returned else -expected)
