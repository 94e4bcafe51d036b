"""Numbers that a forward reads from data, and that its backward needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import autosplit
from autosplit import Stage
from tests.semantics.against_autograd import assert_equals_autograd

FORWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda x, n: x * n.item(),
    "narrow": lambda x, n: torch.narrow(x, 0, n, 2),
    "roll": lambda x, n: x.roll(int(n.item())) * x,
    "slice": lambda x, n: (x[int(n.item()) :] ** 2).sum(),
}


class Reading(nn.Module):
    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = forward

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.function(self.layer(x), n)


def batch(*numbers: float) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(5, 4, requires_grad=True), torch.tensor(n)) for n in numbers]


@pytest.mark.parametrize("name", FORWARDS)
def test_integer(name: str) -> None:
    split = assert_equals_autograd(Reading(FORWARDS[name]), batch(3, 1, 2), fullgraph=True)
    assert len(split.functions) == 1


def test_float() -> None:
    split = assert_equals_autograd(Reading(FORWARDS["times"]), batch(3.5, -1.25), fullgraph=True)
    assert len(split.functions) == 1


def test_compiled() -> None:
    def close(what: str, ours: Any, theirs: Any) -> None:
        torch.testing.assert_close(ours, theirs, msg=what)

    model = Reading(FORWARDS["roll"])
    assert_equals_autograd(model, batch(3, 1), backend="inductor", compare=close)


def test_under_hooks_for_saved_tensors_and_twice() -> None:
    model, plain = Reading(FORWARDS["times"]), Reading(FORWARDS["times"])
    plain.load_state_dict(model.state_dict())
    split = autosplit.split(model, fullgraph=True)
    for module in (split, plain):
        torch.manual_seed(0)
        for x, n in batch(3, 2):
            with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                loss = module(x, n).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert split.pending_bytes > 0
    split.backward_weight()
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_microbatches_with_numbers_of_their_own_are_not_concatenated(backend: str) -> None:
    model = Reading(FORWARDS["times"])
    inputs = batch(3, 2)
    stage = Stage(model, inputs[0], accumulation="concatenated", backend=backend)
    for index, (x, n) in enumerate(inputs):
        (found,) = stage.forward(index, [x.detach().requires_grad_(), n])
        stage.backward_input(index, [torch.ones_like(found)])
    stage.backward_weight([0, 1])
    expected = sum(n * torch.ones(4, 5) @ x.detach() for x, n in inputs)
    torch.testing.assert_close(stage.gradients["layer.weight"], expected)
