"""gather: sums of padded pieces become one concatenation, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autosplit.backends.backend import backend_named
from autosplit.capture.joint_graph import capture
from autosplit.passes import SplitGraphs
from autosplit.passes.rewrites.padded_sums import concatenate_padded_sums
from autosplit.passes.verify import verify
from tests.passes.graphs import computed, ops, program_of
from tests.zoo import Made

X = torch.randn(3, 6, 4)


def call(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """With a weight, so that there is a W."""
    return Made(lambda m, x: function(x.sin() @ m.weight), weight=nn.Parameter(torch.randn(4, 4)))


def scan(x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, 0])
    for step in range(x.shape[1]):
        state = state.tanh() + x[:, step]
    return state


def halves(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 2:], x[..., :2]), -1)


def halves_and_whole(x: Tensor) -> Tensor:
    return halves(x) * 0.3 + x * 0.7


def most(x: Tensor) -> Tensor:
    return x[:, 1:3].exp().sum(1) + x[:, -2].exp()


REWRITTEN = [scan, halves, halves_and_whole]


def overlapping(x: Tensor) -> Tensor:
    return x[:, :4].exp().sum(1) + x[:, 3:].sin().sum(1)


def few(x: Tensor) -> Tensor:
    return x[:, 0].exp() + x[:, 1].sin()


def stepped(x: Tensor) -> Tensor:
    return x[:, ::2].exp() + x[:, 1::2].sin()


def two_wholes(x: Tensor) -> Tensor:
    return halves(x) * 0.3 + x.exp() * x.sin()


def several_dimensions(x: Tensor) -> Tensor:
    return x[:, :3].exp().sum() + x[..., 2:].sin().sum()


LEFT_ALONE = [most, overlapping, few, stepped, two_wholes, several_dimensions]


@pytest.mark.parametrize("function", REWRITTEN)
@pytest.mark.parametrize(("backend", "kind"), [("eager", "backward"), ("inductor", "scatter")])
def test_pieces_are_laid_side_by_side(
    function: Callable[[Tensor], Tensor], backend: str, kind: str
) -> None:
    """Inductor has no padding operators: pieces are written into zeros, and adding them up would
    visit every element once for each piece.
    """
    x, decompositions = X.clone().requires_grad_(), backend_named(backend).decompositions
    program = SplitGraphs(capture(call(function), (x,), {}, decompositions).joint)
    earlier, expected = ops(program.joint), computed(program.joint)
    assert earlier[f"select_{kind}"] + earlier[f"slice_{kind}"] >= 2
    assert concatenate_padded_sums(program)
    verify(program)
    after = ops(program.joint)
    assert after[f"select_{kind}"] + after[f"slice_{kind}"] == 0
    assert after["cat"] == earlier["cat"] + 1
    assert all(map(torch.equal, computed(program.joint), expected))
    assert not concatenate_padded_sums(program)


@pytest.mark.parametrize("function", LEFT_ALONE)
def test_sums_that_would_differ_or_cost_more_stay(function: Callable[[Tensor], Tensor]) -> None:
    program = program_of(call(function), X.clone().requires_grad_())
    earlier = ops(program.joint)
    assert earlier["select_backward"] + earlier["slice_backward"] >= 2
    assert not concatenate_padded_sums(program)
    assert ops(program.joint) == earlier


def test_piece_that_is_read_elsewhere_stays() -> None:
    """The gradient of one half, padded, is also the gradient of another input."""
    model = Made(lambda _, x, y: (x + y)[..., :2].exp() + x[..., 2:].sin())
    program = program_of(model, X.clone().requires_grad_(), X.clone().requires_grad_())
    earlier = ops(program.joint)
    assert not concatenate_padded_sums(program)
    assert ops(program.joint) == earlier
