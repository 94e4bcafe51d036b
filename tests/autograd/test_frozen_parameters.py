"""Parameters that are frozen around a backward whose weight gradients wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.autograd.faces import FACES
from tests.semantics.against_autograd import assert_alike

FROZEN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "first layer": lambda model: model.get_submodule("0"),
    "all": lambda model: model,
}


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def clip(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("face", "frozen"),
    [("whole", "first layer"), ("whole", "all"), ("parts", "all"), ("compiled", "first layer")],
)
def test_a_parameter_frozen_while_pending_gets_its_gradient(face: str, frozen: str) -> None:
    """In the plain model, it has the gradient already when it is frozen."""
    torch._dynamo.reset()
    xs = torch.randn(2, 3, 4)

    def drive(call: Any, model: nn.Module) -> Any:
        model.requires_grad_(True)
        for x in xs:
            call(x).square().sum().backward()
        FROZEN[frozen](model).requires_grad_(False)
        return clip(model), [parameter.requires_grad for parameter in model.parameters()]

    # The second call adds to the gradients of the first.
    assert_alike(layers(), drive, drive, face=FACES[face])


@pytest.mark.parametrize("face", FACES)
def test_a_parameter_frozen_before_backward_gets_no_gradient(face: str) -> None:
    """Autograd drops the gradient of a parameter that needs none when the gradient arrives."""
    torch._dynamo.reset()
    x = torch.randn(3, 4)

    def drive(call: Any, model: Any) -> Any:
        loss = call(x).square().sum()
        model[0].requires_grad_(False)
        loss.backward()
        model[0].requires_grad_(True)
        return clip(model), model[0].weight.grad

    assert_alike(layers(), drive, face=FACES[face])
