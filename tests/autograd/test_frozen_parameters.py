"""Parameters that are frozen around a backward whose weight gradients wait."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.autograd.faces import FACES

FROZEN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "first layer": lambda model: model.get_submodule("0"),
    "all": lambda model: model,
}


def clip(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("face", "frozen"),
    [("whole", "first layer"), ("whole", "all"), ("parts", "all"), ("compiled", "first layer")],
)
def test_frozen_while_its_gradient_is_pending(face: str, frozen: str) -> None:
    """The plain model has had the gradient by then."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    module = FACES[face](model)
    for _ in range(2):  # the second adds to what is there
        xs = torch.randn(2, 3, 4)
        for each, under in ((module, model), (plain, plain)):
            under.requires_grad_(True)
            for x in xs:
                each(x).square().sum().backward()
            FROZEN[frozen](under).requires_grad_(False)
        norms = clip(model), clip(plain)
        assert torch.equal(*norms)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.requires_grad == theirs.requires_grad
            assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("face", FACES)
def test_frozen_before_backward(face: str) -> None:
    """Autograd drops the gradient of what needs none when it arrives."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    module = FACES[face](model)
    x = torch.randn(3, 4)
    for each, under in ((module, model), (plain, plain)):
        loss = each(x).square().sum()
        under[0].requires_grad_(False)
        loss.backward()
        under[0].requires_grad_(True)
    clip(model)
    clip(plain)
    assert model[0].weight.grad is plain[0].weight.grad is None
    assert torch.equal(model[2].weight.grad, plain[2].weight.grad)
