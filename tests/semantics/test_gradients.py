"""Gradients: summed over steps, inside the forward, under checkpoints and hooks."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import autosplit
from tests.semantics.against_autograd import (
    assert_alike,
    assert_equals_autograd,
    assert_same,
    fresh,
    gradients,
    leaves,
    within,
)

# --- forwards and backwards that ask autograd for gradients are one graph -------------------------


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 1)

    def energy(self, x: Tensor) -> Tensor:
        energy: Tensor = self.outer(self.inner(x).tanh())
        return energy

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


class Forces(Energy):
    """A field and its derivative, as in interatomic potentials."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.energy(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -forces


class InnerStep(Energy):
    """A step of learning inside of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        loss = self.energy(x).square().mean()
        (slope,) = torch.autograd.grad(loss, self.inner.weight, create_graph=True)
        learnt = F.linear(x, self.inner.weight - 0.1 * slope, self.inner.bias)
        return self.outer(learnt.tanh())


@pytest.mark.parametrize("model", [Forces, InnerStep])
def test_gradients_inside_are_part_of_the_graph(model: type[nn.Module]) -> None:
    split = assert_equals_autograd(model(), [(torch.randn(4, 8).requires_grad_(),)] * 2)
    assert len(split.functions) == 1


# --- ``torch.utils.checkpoint`` inside a model: same gradients, same random numbers ---------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.reentrant = reentrant

    def block(self, x: Tensor) -> Tensor:
        return F.dropout(torch.sin(self.first(x)), 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_equals_autograd(reentrant: bool) -> None:
    batch = leaves(5, 4)
    # Reentrant checkpoints add to .grad one by one: the same terms in another order.
    compare = within(1e-6) if reentrant else assert_same
    model = Checkpointed(reentrant)
    assert_equals_autograd(model, batch, compare=compare)


# --- hooks on modules, tensors and parameters: kept, or refused -----------------------------------


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def double_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] * 2,)


@pytest.mark.parametrize(("name", "pre"), [("", True), ("0", False)])
def test_forward_hooks(name: str, pre: bool) -> None:
    model = layers()
    module = model.get_submodule(name)
    if pre:
        module.register_forward_pre_hook(double_input)
    else:
        module.register_forward_hook(double)
    assert_equals_autograd(model, leaves(3, 4))


def test_forward_hook_added_and_removed_after_the_capture() -> None:
    model = layers()
    split = autosplit.split(model)
    x = torch.randn(3, 4)
    plain = split(x)
    handle = model[1].register_forward_hook(double)
    assert torch.equal(split(x), plain * 2)
    handle.remove()
    assert torch.equal(split(x), plain)


def test_hooks_on_inputs_and_outputs() -> None:
    split = autosplit.split(layers())
    log: list[str] = []
    x = torch.randn(3, 4, requires_grad=True)
    x.register_hook(lambda grad: log.append("input"))
    for _ in range(2):
        output = split(x)
        output.register_hook(lambda grad: log.append("output"))
        output.sum().backward()
    assert log == ["output", "input"] * 2


def test_hooks_on_saved_tensors() -> None:
    """They get what the forward saves; nothing else keeps it until the backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    shelf: list[list[float]] = []
    alive: list[weakref.ref[Tensor]] = []
    inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]

    def pack(tensor: Tensor) -> int:
        alive.append(weakref.ref(tensor))
        shelf.append(tensor.tolist())
        return len(shelf) - 1

    def unpack(at: int) -> Tensor:
        return torch.tensor(shelf[at])

    def drive(call: Any, model: nn.Module) -> list[Any]:
        arguments = fresh(inputs)
        with nullcontext() if call is model else saved_tensors_hooks(pack, unpack):
            losses = [call(x).square().sum() for x in arguments]
        kept = {*map(id, arguments)}
        assert [ref for ref in alive if ref() is not None and id(ref()) not in kept] == []
        for loss in losses:
            loss.backward()
        return gradients(arguments)

    assert_alike(model, drive, pending=2)
