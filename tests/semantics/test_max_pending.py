"""``max_pending``: how many microbatches wait for W, with gradients bit for bit."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosplit import SplitError, split
from autosplit.dynamo.pending_weights import Deferral


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that come and go.

    Attributes:
        peak: the most bytes that lived at a time, of those made meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if _plain(t)}
        found = func(*args, **(kwargs or {}))
        for tensor in filter(_plain, tree_leaves(found)):
            storage = tensor.untyped_storage()
            if id(storage) not in before and id(storage) not in self._live:
                self._live[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, id(storage), None)
                self.peak = max(self.peak, sum(self._live.values()))
        return found


def _plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).relu()
        torch._dynamo.graph_break()
        return self.two(y) + self.one(y)


def forwards_first(model: nn.Module, batches: list[Tensor]) -> None:
    for loss in [model(batch).square().mean() for batch in batches]:
        loss.backward()


def one_by_one(model: nn.Module, batches: list[Tensor]) -> None:
    for batch in batches:
        model(batch).square().mean().backward()


def assert_same_gradients(mine: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("order", [one_by_one, forwards_first])
@pytest.mark.parametrize("limit", [1, 2, math.inf])
def test_bound_holds(order: Callable[..., None], limit: float) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = split(copy.deepcopy(plain), max_pending=limit)
    batches = list(torch.randn(5, 4, 8))
    order(model, batches)
    assert model.pending == min(5, limit)
    order(plain, batches)
    assert_same_gradients(model, plain)
    assert ("max_pending" in model.report()) == (limit < 5)


@pytest.mark.parametrize("order", [one_by_one, forwards_first])
def test_in_parts(order: Callable[..., None]) -> None:
    plain = Broken()
    model = split(copy.deepcopy(plain), max_pending=2)
    batches = list(torch.randn(5, 4, 8))
    order(model, batches)
    assert model.pending == 2
    order(plain, batches)
    assert_same_gradients(model, plain)
    assert "3 microbatch(es) had their weight gradients computed" in model.report()


@pytest.mark.parametrize("order", [one_by_one, forwards_first])
@pytest.mark.parametrize("model", [Broken, lambda: nn.Linear(8, 8)])
def test_backend(order: Callable[..., None], model: Callable[[], nn.Module]) -> None:
    plain = model()
    mine = copy.deepcopy(plain)
    compiled = torch.compile(mine, backend="autosplit", options={"max_pending": 2})
    batches = list(torch.randn(5, 4, 8))
    order(compiled, batches)
    assert Deferral(mine).pending == 2
    order(plain, batches)
    assert_same_gradients(mine, plain)


def test_by_default_one_waits_and_none_during_the_next_forward() -> None:
    seen = []
    model = split(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    for batch in torch.randn(3, 4, 8):
        loss = model(batch).square().mean()
        seen.append(model.pending)
        loss.backward()
        seen.append(model.pending)
    assert seen == [0, 1] * 3


def test_evaluation_leaves_what_waits() -> None:
    model = split(nn.Linear(8, 8))
    model(torch.randn(4, 8)).sum().backward()
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert model.pending == 1


def test_who_misses_a_microbatch_is_told() -> None:
    model = split(nn.Linear(8, 8))
    one_by_one(model, list(torch.randn(3, 4, 8)))
    with pytest.raises(SplitError, match="max_pending=1 had 2 computed before; raise it"):
        model.backward_weight(microbatches=3)


@pytest.mark.parametrize("limit", [0, -1, True, math.nan])
def test_no_bound(limit: int) -> None:
    with pytest.raises(SplitError, match="max_pending must be at least 1"):
        split(nn.Linear(8, 8), max_pending=limit)


def test_failed_backward_does_not_end_the_bound() -> None:
    model = split(nn.Linear(8, 8))
    one_by_one(model, list(torch.randn(2, 4, 8)))
    model.zero_grad()
    x = torch.randn(4, 8, requires_grad=True)
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    model.zero_grad()
    one_by_one(model, list(torch.randn(4, 4, 8)))
    assert model.pending == 1


def test_a_loop_that_accumulates_holds_what_it_holds_without_split() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    plain = nn.Sequential(*layers)
    mine, batches = split(copy.deepcopy(plain)), list(torch.randn(8, 256, 64))
    peaks = []
    for model in (mine, plain):
        one_by_one(model, batches[:1])  # tracing
        model.zero_grad()
        with LiveBytes() as held:
            one_by_one(model, batches)
        peaks.append(held.peak)
    assert peaks[0] <= 1.3 * peaks[1]
