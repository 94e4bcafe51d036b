"""Gradients that somebody holds from one backward to the next, as a list of them, or views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from tests.autograd.faces import FACES
from tests.semantics.against_autograd import assert_alike, within
from tests.zoo import layered

HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda grad: grad,
    "itself, used": lambda grad: (grad.sum(), grad)[1],
    "detached": lambda grad: grad.detach(),
    "row": lambda grad: grad[0],
    "array": lambda grad: grad.numpy(),
    "storage": lambda grad: torch.empty(0).double().set_(grad.untyped_storage()),
    "dlpack": torch.from_dlpack,
}


def used_twice() -> nn.Module:
    """One of its parameters is in use twice."""
    return layered(lambda m, x: m.second(m.linear(m.linear(x).tanh()).tanh()))


def backward(module: Any, x: Tensor) -> None:
    """Two calls, which autograd adds up before it adds them to ``.grad``."""
    (module(x).square().sum() + module(x + 1).square().sum()).backward()


HELD = [*(("whole", hold) for hold in HOLDS), ("parts", "itself"), ("compiled", "row")]


@pytest.mark.parametrize(("face", "hold"), HELD)
def test_later_backwards_accumulate_into_a_held_gradient(face: str, hold: str) -> None:
    torch._dynamo.reset()
    xs = torch.randn(4, 3, 4).double()

    def drive(call: Any, model: nn.Module) -> list[Tensor]:
        kept: list[Any] = []
        for at, x in enumerate(xs):
            backward(call, x)
            if not at:
                kept += [HOLDS[hold](p.grad) for p in model.parameters()]
            if at == 2:
                model.zero_grad(set_to_none=False)
        return [torch.as_tensor(item).clone() for item in kept]

    # Two uses, two calls: sums are in another order.
    assert_alike(used_twice().double(), drive, face=FACES[face], compare=within(1e-12))


def test_backward_computes_held_gradients_and_defers_the_others() -> None:
    model = used_twice()
    split = autosplit.split(model)
    x = torch.randn(3, 4)
    for _ in range(3):  # a sum that nobody holds
        backward(split, x)
        assert split.pending == 1
        split.backward_weight()
    backward(split, x)
    grads = [p.grad for p in model.parameters()]  # all but one are dropped below
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    del grads[1:]
    for _ in range(2):
        backward(split, x)
        assert split.pending == 0
    grads.clear()
    backward(split, x)
    assert split.pending == 1


def test_backward_raises_if_a_held_gradient_cannot_be_computed() -> None:
    model = used_twice()
    split = autosplit.split(model)
    x = torch.randn(3, 4, requires_grad=True)
    backward(split, x)
    split.backward_weight()
    kept = model.linear.weight.grad
    source = x * 1.0
    loss = split(source).square().sum()

    def write(grad: Tensor) -> None:
        source.detach().zero_()

    source.register_hook(write)
    with pytest.raises(autosplit.SplitError, match="written in place"):
        loss.backward()
    assert kept.isfinite().all()
