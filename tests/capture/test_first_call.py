"""A model's Python runs once for each call, the first one too."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError, Stage


def _train(module: nn.Module, steps: int = 3) -> list[Tensor]:
    """Outputs, gradients and what the generator gives afterwards."""
    torch.manual_seed(3)
    results = []
    for _ in range(steps):
        output = module(torch.ones(2, 4))
        results.append(output.detach())
        output.square().sum().backward()
        if isinstance(module, autosplit.SplitModule):
            module.backward_weight()
    return [*results, *(p.grad for p in module.parameters()), torch.rand(4)]


class Counter:
    count = 0


def _appends(seen: list[int]) -> Callable[..., None]:
    return lambda *_: seen.append(1)


def _prints(seen: list[int]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        print(end="")
        seen.append(1)

    return hook


def _counts(seen: list[int]) -> Callable[..., None]:
    counter = Counter()

    def hook(*_: Any) -> None:
        counter.count += 1
        seen[:] = [1] * counter.count

    return hook


@pytest.mark.parametrize("hook", [_appends, _prints, _counts])
def test_hooks_run_once_for_each_call(hook: Callable[[list[int]], Any]) -> None:
    seen: list[int] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    model[0].register_forward_hook(hook(seen))
    split = autosplit.split(model)
    result = _train(split)
    assert len(seen) == 3
    assert all(map(torch.equal, result, _train(plain)))


class Building(nn.Module):
    """As BigBird-Pegasus does: another layer, once the length of the input is known."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.last: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x))
        if self.last is None:
            self.last = nn.Linear(4, x.shape[0])
        return self.drop(self.last(x))


def _lazy() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.LazyLinear(4), nn.Dropout(0.5), nn.LazyLinear(2))


class Caching(nn.Module):
    """Fills a cache with random numbers, and sets an attribute of another object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.config = Counter()
        self.noise: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.noise is None:
            self.noise = torch.rand(4)
            self.config.count = 1
        return self.drop(self.linear(x) + self.noise)


class Hooking(nn.Module):
    """As transformers does in the first call that asks for hidden states: hooks, under a lock."""

    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            with self.lock:
                self.linear.register_forward_hook(lambda module, args, output: output * 2)
                self.hooked = True
        return self.drop(self.linear(x))


@pytest.mark.parametrize("example", [False, True], ids=["call", "example inputs"])
@pytest.mark.parametrize("make", [Building, Caching, Hooking])
def test_random_numbers_of_a_first_call(make: Callable[[], nn.Module], example: bool) -> None:
    """The first call draws initial values and then dropout, as in eager mode."""
    model = make()
    plain = copy.deepcopy(model)
    split = autosplit.split(model, torch.ones(2, 4)) if example else autosplit.split(model)
    assert all(map(torch.equal, _train(split), _train(plain)))
    assert len(split.functions) == 1


@pytest.mark.parametrize("example", [False, True], ids=["call", "example inputs"])
def test_random_numbers_of_lazy_parameters(example: bool) -> None:
    model = _lazy()
    with pytest.raises(CaptureError, match="without a shape: call it once before"):
        Stage(model, (torch.ones(2, 4),))
    plain = copy.deepcopy(model)
    split = autosplit.split(model, torch.ones(2, 4)) if example else autosplit.split(model)
    assert all(map(torch.equal, _train(split), _train(plain)))
    assert len(split.functions) == 1


def test_first_call_of_a_model_that_needs_one_graph() -> None:
    split = autosplit.split(Caching(), fullgraph=True)
    _train(split)
    assert len(split.functions) == 1


def test_every_call_builds() -> None:
    """The first is run as it is; what the others do is no secret of the first."""

    class Restless(Building):
        def forward(self, x: Tensor) -> Tensor:
            self.last = nn.Linear(4, 2)
            return self.last(self.first(x))

    split = autosplit.split(Restless())
    for _ in range(3):
        split(torch.ones(2, 4)).sum().backward()
        split.backward_weight()
    assert split.functions == ()
    assert "split graph by graph" in split.report()
