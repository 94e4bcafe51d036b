"""Hooks of ``register_multi_grad_hook`` that are put on between the forward and the backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import autosplit
from autosplit.errors import SplitError
from tests.autograd.faces import FACES
from tests.gradients import assert_same_gradients
from tests.semantics.against_autograd import assert_alike

MODES: tuple[Literal["all", "any"], ...] = ("all", "any")


def deep() -> nn.Module:
    """Layers of which autograd's graph has edges to a few only."""
    torch._dynamo.reset()
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])


GROUPS = ((0, 4), (1, 2), (0, 1, 2, 3, 4))


@pytest.mark.parametrize("face", FACES)
def test_waits_for_all(face: str) -> None:
    """Once in each backward, with the sum over its calls; single hooks beside it, too."""
    drives = [waiting(layers, calls) for calls in (1, 2) for layers in GROUPS]
    assert_alike(deep(), *drives, face=FACES[face])


def waiting(layers: tuple[int, ...], calls: int) -> Callable[[Any, Any], Any]:
    """Two backwards, of which a hook waits for these layers in the second."""
    x = torch.randn(3, 4)

    def drive(call: Any, model: Any) -> Any:
        call(x).square().sum().backward()
        loss = torch.stack([call(x + at).square().sum() for at in range(calls)]).sum()
        loss = loss + model[0].weight.square().sum()  # the engine brings another part of this
        weights = [model[at].weight for at in layers]
        seen: list[list[Tensor | None]] = []
        single: list[Tensor] = []
        several = register_multi_grad_hook(weights, lambda grads: seen.append([*grads]))
        other = model[0].weight.register_hook(lambda grad: single.append(grad) or grad * 2)
        late = model[0].weight.register_post_accumulate_grad_hook(
            lambda item: single.append(item.grad.clone())
        )
        loss.backward()
        assert [len(grads) for grads in seen] == [len(layers)]
        assert len(single) == 2
        for handle in (several, other, late):
            handle.remove()
        call(x).square().sum().backward()
        return seen, single

    return drive


@pytest.mark.parametrize("face", FACES)
def test_any_is_called_once_in_each_backward(face: str) -> None:
    model, x = deep(), torch.randn(3, 4)
    plain, module = copy.deepcopy(model), FACES[face](model)
    for layers in ((0, 1), (0, 1, 2, 3, 4)):
        for call, under in ((module, model), (plain, plain)):
            seen: list[Tensor] = []
            loss = call(x).square().sum()
            weights = [under[at].weight for at in layers]  # type: ignore[index]
            handle = register_multi_grad_hook(weights, seen.append, mode="any")
            loss.backward()
            assert len(seen) == 1
            call(x).square().sum().backward()
            assert len(seen) == 2
            handle.remove()
        assert_same_gradients(model, plain, exact=False)


def test_over_an_unused_parameter_is_called_once_with_none() -> None:
    x = torch.randn(3, 4)

    def drive(call: Any, model: Any) -> Any:
        loss, seen = call(x).square().sum(), list[list[Tensor | None]]()
        parameters = [*model.parameters()]
        handle = register_multi_grad_hook(parameters, lambda grads: seen.append([*grads]))
        loss.backward()
        handle.remove()
        assert [grads.count(None) for grads in seen] == [1]
        return [gradient for gradient in seen[0] if gradient is not None]

    model = deep()
    model.register_parameter("unused", nn.Parameter(torch.randn(4)))
    assert_alike(model, drive)


class Halves(nn.Module):
    """Two graphs, each with more parameters than autograd's graph has edges to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = deep(), deep()

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.second(h)


@pytest.mark.parametrize("mode", MODES)
def test_over_several_graphs_is_refused(mode: Literal["all", "any"]) -> None:
    model = Halves()
    loss = FACES["parts"](model)(torch.randn(3, 4)).sum()
    handle = register_multi_grad_hook([*model.parameters()], lambda _: None, mode=mode)
    with pytest.raises(SplitError, match=r"register_multi_grad_hook.* before the forward"):
        loss.backward()
    handle.remove()


@pytest.mark.parametrize("mode", MODES)
def test_beside_an_output_is_refused(mode: Literal["all", "any"]) -> None:
    model: Any = deep()
    output = autosplit.split(model)(torch.randn(3, 4))
    register_multi_grad_hook([model[2].weight, output], lambda _: None, mode=mode)
    with pytest.raises(SplitError, match=r"register_multi_grad_hook.* before the forward"):
        output.sum().backward()


def test_fires_again_after_a_backward_that_failed() -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("no gradient today")

    model: Any = deep()
    split, x, seen = autosplit.split(model), torch.randn(3, 4), []
    hook: Callable[[Any], None] = seen.append
    first: Any = nn.Linear(4, 4)
    loss = split(first(x)).sum()
    register_multi_grad_hook([layer.weight for layer in model], hook)
    handle = first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="no gradient today"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    split(first(x)).sum().backward()
    assert len(seen) == 1
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(first(x)).sum().backward()
    assert_same_gradients(model, plain, exact=False)
