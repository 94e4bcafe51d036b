"""Rewrites of single operators and pairs of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.analysis.aliasing import is_view
from autosplit.passes.graph import calls
from autosplit.passes.rewrites.peephole import (
    divide_backward_operators,
    drop_summed_dimensions,
    fold_powers,
    fold_views,
    half_precision_dropout,
)
from autosplit.passes.verify import verify
from tests.passes.graphs import computed, ops, program_of

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


# --- fold_views: views that change nothing go -----------------------------------------------------


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
    assert fold_views(program) == (left < steps)
    assert len(graph.find_nodes(op="call_function", target=aten.t.default)) == left
    graph.lint()
    x = torch.randn(2, 3)
    expected = x if steps % 2 == 0 else x.t()
    (result,) = fx.GraphModule(nn.Module(), graph)(x)
    assert torch.equal(result, expected if returned else -expected)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detached": lambda x: x.detach(),  # torch 2.11 does not trace the method itself
    "expanded": lambda x: x.expand(2, -1),
    "viewed": lambda x: x.view(2, 3),
}


class Views(nn.Module):
    def __init__(self, kind: str, *, returned: bool) -> None:
        super().__init__()
        self.view, self.returned = VIEWS[kind], returned

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view = self.view(self.view(x * 2))
        return view if self.returned else view + 1, x.tanh()


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("returned", [False, True])
def test_views_that_change_nothing(kind: str, returned: bool) -> None:
    """A returned value remains a separate tensor."""
    program = program_of(Views(kind, returned=returned), torch.randn(2, 3, requires_grad=True))
    expected = computed(program.joint)
    assert fold_views(program)
    assert sum(map(is_view, calls(program.joint.graph))) == returned
    assert all(map(torch.equal, computed(program.joint), expected))
    verify(program)
    assert not fold_views(program)


# --- fold_powers: a power of 1 is its base --------------------------------------------------------


class Norm(nn.Module):
    """The square has a derivative with a power of 1; so have two users' lines."""

    def __init__(self, power: float, *, returned: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.power, self.returned = power, returned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * torch.rsqrt((x * self.weight).pow(2).mean(-1, keepdim=True))
        return hidden.pow(self.power) if self.returned else hidden.pow(self.power) * self.weight


@pytest.mark.parametrize(
    ("power", "returned", "left"),
    [(1.0, False, 0), (1, False, 0), (1.0, True, 1), (3.0, False, 0)],
)
def test_powers_of_one_fold(power: float, returned: bool, left: int) -> None:
    """Except one that is an output: it stays a tensor of its own."""
    program = program_of(Norm(power, returned=returned), torch.randn(3, 4))
    expected = computed(program.joint)
    assert fold_powers(program)
    powers = [n for n in calls(program.joint.graph) if n.target is aten.pow.Tensor_Scalar]
    assert sum(node.args[1] == 1 for node in powers) == left
    assert all(map(torch.equal, computed(program.joint), expected))
    assert not fold_powers(program)


def test_a_power_of_the_callers_tensor_stays() -> None:
    """The caller may overwrite the tensor before the backward; autograd then reads the copy."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta.update(val=torch.empty(2, 3), role=Role(Kind.INPUT, "x"))
    power = graph.call_function(aten.pow.Tensor_Scalar, (node, 1.0))
    last = graph.call_function(aten.neg.default, (power,))
    power.meta["val"] = last.meta["val"] = torch.empty(2, 3)
    graph.output([last]).meta["roles"] = (Role(Kind.OUTPUT, "output"),)
    assert not fold_powers(SplitGraphs(fx.GraphModule(nn.Module(), graph)))
