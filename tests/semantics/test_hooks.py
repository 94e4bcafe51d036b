"""Hooks on modules, tensors and parameters: kept, or refused."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError
from tests.semantics.against_autograd import assert_equals_autograd


class Model(nn.Module):
    def __init__(self, hook: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.hook is not None:
            h.register_hook(self.hook)
        return self.last(h)


def batches() -> list[tuple[Tensor]]:
    return [(torch.randn(3, 4).requires_grad_(),) for _ in range(2)]


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def double_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] * 2,)


@pytest.mark.parametrize("name", ["", "first"], ids=["root", "submodule"])
@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_forward_hooks(name: str, pre: bool) -> None:
    model = Model()
    module = model.get_submodule(name)
    if pre:
        module.register_forward_pre_hook(double_input)
    else:
        module.register_forward_hook(double)
    assert_equals_autograd(model, batches())


def test_hook_on_a_tensor_inside_the_forward() -> None:
    assert_equals_autograd(Model(lambda grad: grad * 3), batches())


def test_forward_hook_added_and_removed_after_the_capture() -> None:
    model = Model()
    split = autosplit.split(model)
    x = torch.randn(3, 4)
    plain = split(x)
    handle = model.last.register_forward_hook(double)
    assert torch.equal(split(x), plain * 2)
    handle.remove()
    assert torch.equal(split(x), plain)


def test_hooks_on_parameters_fire_for_every_microbatch() -> None:
    model = Model()
    split, plain = autosplit.split(model), copy.deepcopy(model)
    log: list[str] = []
    model.last.weight.register_hook(lambda grad: log.append("grad") or grad * 2)
    model.last.weight.register_post_accumulate_grad_hook(lambda _: log.append("done"))
    for count, batch in enumerate(batches(), 1):
        split(*batch).sum().backward()
        assert log == ["grad", "done"] * count
        plain(*batch).sum().backward()
    assert split.pending == 0
    assert torch.equal(model.last.weight.grad, 2 * plain.last.weight.grad)


def test_hooks_on_inputs_and_outputs() -> None:
    split = autosplit.split(Model())
    log: list[str] = []
    x = torch.randn(3, 4, requires_grad=True)
    x.register_hook(lambda grad: log.append("input"))
    for _ in range(2):
        output = split(x)
        output.register_hook(lambda grad: log.append("output"))
        output.sum().backward()
    assert log == ["output", "input"] * 2


@pytest.mark.parametrize("name", ["", "first"], ids=["root", "submodule"])
@pytest.mark.parametrize(
    "register",
    [nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook],
    ids=["backward", "backward pre"],
)
def test_module_backward_hooks_are_refused(name: str, register: Callable[..., Any]) -> None:
    """Also where they are added after the capture. On the split module itself they work."""
    model = Model()
    split = autosplit.split(model)
    split.capture(torch.randn(3, 4))
    register(model.get_submodule(name), lambda *_: None)
    with pytest.raises(CaptureError, match="has a backward hook"):
        split.capture(torch.randn(3, 4))


def test_hooks_on_saved_tensors() -> None:
    """They get what the forward saves; nothing else keeps it until the backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    split = autosplit.split(model, max_pending=math.inf)
    shelf: list[list[float]] = []
    alive: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> int:
        alive.append(weakref.ref(tensor))
        shelf.append(tensor.tolist())
        return len(shelf) - 1

    inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda at: torch.tensor(shelf[at])):
        losses = [split(x).square().sum() for x in inputs]
    kept = {id(x) for x in inputs}
    assert [ref for ref in alive if ref() is not None and id(ref()) not in kept] == []
    for loss in losses:
        loss.backward()
    assert split.pending == 2
    split.backward_weight()
    mine = [x.grad for x in inputs]
    for x, grad in zip(inputs, mine, strict=True):
        x.grad = None
        plain(x).square().sum().backward()
        assert torch.equal(grad, x.grad)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_backward_hook_on_the_split_module() -> None:
    split = autosplit.split(Model())
    seen: list[Tensor] = []
    split.register_full_backward_hook(lambda module, grads, outputs: seen.append(grads[0]))
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        split(x).sum().backward()
        assert torch.equal(seen[-1], x.grad)
    split.backward_weight()
    assert len(seen) == 2
