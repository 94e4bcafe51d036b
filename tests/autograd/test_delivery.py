"""Weight gradients in ``.grad``, as autograd's engine would have added them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import autosplit
from tests.semantics.against_autograd import assert_alike

Log = list[str]
ENGINE = "torch::autograd::AccumulateGrad"


def names_run(function: Callable[[], None]) -> set[str]:
    with torch.profiler.profile(acc_events=True) as profile:
        function()
    return {event.name for event in profile.events()}


def backward(module: nn.Module, *batches: Tensor) -> None:
    for batch in batches:
        module(batch).square().sum().backward()


def tensor_hook(weight: Tensor, log: Log) -> Any:
    return weight.register_hook(lambda grad: log.append("tensor") or grad * 2)


def late_hook(weight: Tensor, log: Log) -> Any:
    return weight.register_post_accumulate_grad_hook(lambda _: log.append("late"))


def held_node(weight: Tensor) -> Any:
    """Autograd's node for the weight, which goes with its hooks where nobody holds it."""
    weight.node = get_gradient_edge(weight).node
    return weight.node


def hook_behind(weight: Tensor, log: Log) -> Any:
    return held_node(weight).register_hook(lambda *_: log.append("behind"))


def hook_before(weight: Tensor, log: Log) -> Any:
    def triple(grads: tuple[Tensor]) -> tuple[Tensor]:
        log.append("before")
        return (grads[0] * 3,)

    return held_node(weight).register_prehook(triple)


def hook_on_several(weight: Tensor, log: Log) -> Any:
    return register_multi_grad_hook([weight], lambda _: log.append("several"))


HOOKS = [tensor_hook, late_hook, hook_behind, hook_before, hook_on_several]


@pytest.mark.parametrize("register", HOOKS, ids=lambda item: item.__name__)
@pytest.mark.parametrize("late", [False, True], ids=["before", "while pending"])
def test_hooks_are_found_whenever_they_are_put_on(
    register: Callable[[Tensor, Log], Any], late: bool
) -> None:
    """They fire in ``backward()``, for what it brings: what was pending is not theirs to see."""
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    split = autosplit.split(model, max_pending=math.inf)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    mine: Log = []
    theirs: Log = []
    for hooked in (True, False, True):
        if late:
            backward(split, x, y)
            backward(plain, x, y)
            assert split.pending == 2
        if hooked:
            handles = register(model.weight, mine), register(plain.weight, theirs)
        backward(split, y)
        backward(plain, y)
        assert mine == theirs
        assert (split.pending == 0) is hooked
        if late and hooked:
            for handle in handles:
                handle.remove()
            backward(split, x)
            backward(plain, x)
            handles = register(model.weight, mine), register(plain.weight, theirs)
        split.backward_weight()
        assert mine == theirs
        assert torch.equal(model.weight.grad, plain.weight.grad)
        assert torch.equal(model.bias.grad, plain.bias.grad)
        for handle in handles:
            handle.remove()
    assert len(mine) == 2


def test_added_without_the_engine() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    for _ in range(2):
        backward(split, x)
        assert ENGINE not in names_run(split.backward_weight)
    (split(x).sum() + split(x).sum()).backward()
    assert ENGINE not in names_run(split.backward_weight)


class Layouts(nn.Module):
    """Parameters that do not lie in row-major order, and one whose gradient is another's too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.spread = nn.Parameter(torch.randn(8, 5)[::2])
        self.a, self.b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).mean((2, 3))
        return h @ self.turned + h @ self.spread + self.a + self.b


def test_gradients_lie_as_autograd_lays_them() -> None:
    model, batches = Layouts(), torch.randn(2, 2, 3, 6, 6)

    def drives(x: Tensor) -> Callable[..., list[Any]]:
        def drive(call: Any, model: nn.Module) -> list[Any]:
            backward(call, x)
            if call is not model:
                call.backward_weight()
            return [parameter.grad.stride() for parameter in model.parameters()]

        return drive

    assert_alike(model, *map(drives, batches))
    places = {parameter.grad.data_ptr() for parameter in model.parameters()}
    assert len(places) == len(list(model.parameters()))


def test_sparse_sum() -> None:
    x = torch.randn(4, 3)

    def drive(call: Any, model: Any) -> None:
        model.weight.grad = torch.eye(2, 3).to_sparse()
        backward(call, x)

    assert_alike(nn.Linear(3, 2), drive)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch without grad_dtype")
def test_gradients_of_another_dtype() -> None:
    x = torch.randn(4, 3, dtype=torch.bfloat16)

    def drive(call: Any, model: Any) -> None:
        model.weight.grad_dtype = torch.float32
        backward(call, x)

    model = nn.Linear(3, 2).bfloat16()
    assert_alike(model, drive, drive)
    assert model.weight.grad.dtype is torch.float32


@pytest.mark.filterwarnings("ignore:.*nomaly:UserWarning", "ignore:Error detected:UserWarning")
def test_anomaly_detection_sees_weight_gradients() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    with torch.autograd.detect_anomaly():
        split(torch.full((4, 3), float("nan"))).sum().backward()
        with pytest.raises(RuntimeError, match="returned nan values"):
            split.backward_weight()
