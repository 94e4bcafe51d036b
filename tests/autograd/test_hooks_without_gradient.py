"""Hooks of parameters that get no gradient in a backward: plain autograd does not call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import autosplit
from tests.autograd.faces import FACES
from tests.autograd.test_parameter_hooks import (
    accumulator,
    sums_behind_nodes,
    update_in_tensor_hooks,
)
from tests.semantics.against_autograd import assert_alike


class Heads(nn.Module):
    """Each output depends on the body, and on no other head."""

    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.body = nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        return h, self.first(h), self.second(h)


class BrokenHeads(Heads):
    """Two graphs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        torch._dynamo.graph_break()
        return h, self.first(h), self.second(h)


def register_all(model: Any, calls: list[Any]) -> list[Any]:
    """Register a hook of each kind on each parameter; each notes its call."""
    kept: list[Any] = []
    for name, parameter in model.named_parameters():
        node = accumulator(parameter)

        def note(kind: str, value: Tensor | None, name: str = name) -> None:
            calls.append((name, kind, value is not None))

        kept += [
            node,
            parameter.register_hook(lambda g, note=note: note("tensor", g) or g * 2),
            parameter.register_post_accumulate_grad_hook(lambda p, note=note: note("late", p.grad)),
            node.register_prehook(lambda grads, note=note: note("before", grads[0])),
            node.register_hook(lambda _, grads, note=note: note("behind", grads[0])),
        ]
    return kept


# Of each microbatch, the outputs of its loss.
STEPS: dict[str, list[tuple[int, ...]]] = {
    "none of the heads": [(0,)],
    "another head each time": [(1,), (2,), (0, 1), (1, 2)],
}


@pytest.mark.parametrize("late", [False, True], ids=["registered before", "between"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("face", FACES)
def test_no_hook_is_called(face: str, steps: str, late: bool) -> None:
    xs = torch.randn(2, 3, 4)

    def drive(call: Any, model: Any) -> Any:
        calls: list[Any] = []
        kept = [] if late else register_all(model, calls)
        for outputs in STEPS[steps]:
            losses = [call(x) for x in xs]
            if late and not kept:
                kept = register_all(model, calls)
            for results in losses:
                sum(results[at].square().sum() for at in outputs).backward()
        for handle in kept:
            if not isinstance(handle, torch.autograd.graph.Node):
                handle.remove()
        return sorted(calls)

    model = Heads() if face == "whole" else BrokenHeads()
    assert_alike(model, drive, drive, face=FACES[face])


def test_hooks_are_called_for_a_gradient_from_elsewhere() -> None:
    x = torch.randn(3, 4)

    def drive(call: Any, model: Any) -> Any:
        calls: list[Any] = []
        kept = register_all(model, calls)
        for _ in range(2):  # each backward goes through two calls
            loss = call(x)[0].sum() + call(x)[1].sum() + model.second.weight.sum()
            loss.backward()
        del kept
        return sorted(calls)

    assert_alike(Heads(), drive)


def test_hooks_stay_as_they_were() -> None:
    """Also after a backward that failed."""
    model = Heads()
    calls: list[Tensor] = []
    handles: Any = [model.first.weight.register_hook(calls.append)]

    def fail(_: Tensor) -> None:
        raise ValueError("no gradient today")

    split = autosplit.split(model)
    failing = model.body.weight.register_hook(fail)
    with pytest.raises(ValueError, match="no gradient today"):
        split(torch.randn(3, 4))[0].sum().backward()
    failing.remove()
    for at in (0, 1, 1):
        split(torch.randn(3, 4))[at].sum().backward()
    hooks: Any = model.first.weight._backward_hooks
    assert len(calls) == 2
    assert [*hooks.values()] == [calls.append]
    handles[0].remove()
    split(torch.randn(3, 4))[1].sum().backward()
    assert split.pending == 1


@pytest.mark.parametrize("register", [update_in_tensor_hooks, sums_behind_nodes])
@pytest.mark.parametrize("face", FACES)
def test_an_optimizer_in_the_backward_moves_no_unused_head(
    face: str, register: Callable[[nn.Module], None]
) -> None:
    xs = torch.randn(4, 3, 4)

    def drive(call: Any, model: Any) -> Any:
        register(model)
        for at, x in enumerate(xs):
            call(x)[at % 3].square().sum().backward()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model = Heads() if face == "whole" else BrokenHeads()
    assert_alike(model, drive, face=FACES[face])


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_group_without_gradients_is_not_called(mode: Literal["all", "any"]) -> None:
    x = torch.randn(3, 4)

    def drive(call: Any, model: Any) -> Any:
        calls: list[Any] = []
        register_group: Callable[..., Any] = register_multi_grad_hook
        groups = [[*model.first.parameters()], [*model.first.parameters(), model.body.weight]]
        for group in groups:
            register_group(group, calls.append, mode=mode)
        for at in (0, 1, 0):
            call(x)[at].sum().backward()
        return [[None if g is None else g.clone() for g in grads] for grads in calls]

    assert_alike(Heads(), drive)


@pytest.mark.parametrize("frozen", ["first.weight", "body.weight", ""])
def test_hooks_of_parameters_that_get_hooks_and_are_frozen_after_the_forward(frozen: str) -> None:
    """They are not called with None."""
    model, calls = Heads(), list[Any]()
    output = autosplit.split(model)(torch.randn(3, 4))[1]
    kept = register_all(model, calls)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    output.sum().backward()
    del kept
    assert all(has_gradient for _, _, has_gradient in calls)


class Towers(nn.Module):
    """Each output depends on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(y)


def test_hooks_of_leaves_before_an_input_without_a_gradient() -> None:
    """Inputs that are leaves, and parameters of a module before."""

    def drive(call: Any, model: Any) -> Any:
        torch.manual_seed(0)
        calls: list[Any] = []
        before: Any = nn.ModuleDict({"x": nn.Linear(4, 4), "y": nn.Linear(4, 4)})
        before.leaf = nn.Parameter(torch.randn(3, 4))
        kept = register_all(before, calls)
        x, y = torch.randn(2, 3, 4)
        for first, second in [(before.x(x), before.y(y)), (before.x(x), before.leaf)]:
            for at in (0, 1, 0):
                call(first, second)[at].sum().backward(retain_graph=True)
        del kept
        return sorted(calls)

    assert_alike(Towers(), drive)


def test_hooks_of_frozen_parameters() -> None:
    """Autograd computes their gradient, calls hooks, and drops it."""
    x = torch.randn(3, 4)

    def drive(call: Any, model: Any) -> Any:
        calls: list[Any] = []
        kept = register_all(model, calls)
        for at in (0, 1):
            output = call(x)[at]
            model.first.requires_grad_(False)
            output.sum().backward()
            model.first.requires_grad_(True)
        del kept
        return sorted(calls)

    assert_alike(Heads(), drive)
