"""reuse: results are written over operands that die in them, and over nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autosplit.passes import run
from autosplit.passes.graph import calls
from autosplit.passes.lowering.buffers import reusable_operands
from autosplit.passes.lowering.codegen import generate
from tests.passes.graphs import joint_of
from tests.semantics.against_autograd import assert_equals_autograd


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.function(x, y)


def forward_of(function: Callable[[Tensor, Tensor], object]) -> fx.GraphModule:
    """F, without gradients: nothing is saved."""
    return run(joint_of(Call(function), torch.randn(4, 4), torch.randn(4, 4))).forward


def reused(function: Callable[[Tensor, Tensor], object]) -> list[tuple[str, int]]:
    return [
        (str(node.target).split(".")[1], position)
        for node, position in reusable_operands(forward_of(function).graph).items()
    ]


def test_operand_that_dies() -> None:
    assert reused(lambda x, y: (x @ y) + x) == [("add", 0)]
    assert reused(lambda x, y: x + (x @ y)) == [("add", 1)]
    assert reused(lambda x, y: x - (x @ y)) == []  # would write the wrong way round
    assert reused(lambda x, y: (x @ y).exp().neg()) == [("exp", 0), ("neg", 0)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y,  # the caller's
        lambda x, y: (h := x @ y, h + x),  # returned
        lambda x, y: (h := x @ y, (h + x) @ h)[1],  # read afterwards
        lambda x, y: (v := (h := x @ y).t(), (h + x) @ v)[1],  # read afterwards as a view
        lambda x, y: (h := x @ y, h + h.t())[1],  # read in the same operator as a view
        lambda x, y: (x @ y)[0] + x[0],  # would keep all of it alive
        lambda x, y: (x @ y)[:1] + x,  # smaller than the result
        lambda x, y: x + (x @ y).t(),  # lies otherwise in memory
        lambda x, y: (x > y) + x,  # of another type
        lambda x, y: x.max(1).values + x[0],  # not known to be memory of its own
    ],
)
def test_operand_that_must_live(function: Callable[[Tensor, Tensor], object]) -> None:
    assert [each for each in reused(function) if each[0] == "add"] == []


def test_sizes_that_vary_are_not_asked() -> None:
    """A comparison of symbolic sizes would make the graph fit one size only."""
    module = make_fx(lambda x, y: (x @ y) + x, tracing_mode="symbolic")(
        torch.randn(4, 5), torch.randn(5, 5)
    )
    (product,) = [node for node in calls(module.graph) if "mm" in str(node.target)]
    assert reusable_operands(module.graph) == {}
    assert product.meta["val"].fake_mode.shape_env.guards == []


def test_source() -> None:
    text = generate("forward", forward_of(lambda x, y: x + (x @ y)))
    assert "add = aten.add_.Tensor(mm, args_0); del args_0, mm" in text


def test_what_is_saved_stays_as_it_was() -> None:
    """The result of exp is saved for the backward, and the sum must not be written over it."""

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).exp() + x

    assert_equals_autograd(Saving(), [(torch.randn(3, 4, requires_grad=True),)] * 2)
