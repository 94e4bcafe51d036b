"""Models that no single graph holds: data-dependent branches, Python side effects, prints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .subject import Call, Subject


class Broken(nn.Module):
    """Two layers with room for something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.calls = 0
        self.seen: list[float] = []
        self.scale = 1.0

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(torch.tanh(self.first(x))))

    def between(self, h: Tensor) -> Tensor:
        return h


class ExplicitBreak(Broken):
    def between(self, h: Tensor) -> Tensor:
        torch.compiler.disable(lambda: None)()
        return h


class Branch(Broken):
    """Takes one of two layers by the data."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        return self.second(h) if h.sum() > 0 else self.first(h)


class EarlyReturn(Broken):
    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        if h.abs().max() > 1e6:
            return h
        return self.second(h)


class Item(Broken):
    def between(self, h: Tensor) -> Tensor:
        return h * float(h.detach().abs().max())


class Loop(Broken):
    """Repeats a layer as often as the data says."""

    def between(self, h: Tensor) -> Tensor:
        for _ in range(int(h.detach().abs().sum()) % 3 + 1):
            h = torch.tanh(self.second(h))
        return h


class ToList(Broken):
    def between(self, h: Tensor) -> Tensor:
        values: list[float] = h.detach()[0].tolist()
        return h * max(values)


class ToNumpy(Broken):
    def between(self, h: Tensor) -> Tensor:
        return h + float(h.detach().numpy().std())


class Nonzero(Broken):
    """Picks rows by the data: how many is not known before."""

    def between(self, h: Tensor) -> Tensor:
        return h[h[:, 0] > 0]


class Print(Broken):
    def between(self, h: Tensor) -> Tensor:
        print("mean", end="\r")
        return h


class Warn(Broken):
    def between(self, h: Tensor) -> Tensor:
        warnings.warn("in the forward", stacklevel=2)
        return h


class Log(Broken):
    def between(self, h: Tensor) -> Tensor:
        logging.getLogger("a model").debug("in the forward")
        return h


class CountCalls(Broken):
    """Python state that is written and read."""

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


class KeepNumbers(Broken):
    def between(self, h: Tensor) -> Tensor:
        self.seen.append(float(h.detach().mean()))
        return h * len(self.seen)


class KeepOutput(Broken):
    """Adds what the last call left behind."""

    last: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        found = h if self.last is None else h + self.last
        self.last = h.detach()
        return found


class CacheOnce(Broken):
    cached: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = torch.arange(8.0)
        return h * self.cached


class Anneal(Broken):
    """Reads an attribute that it changes."""

    def between(self, h: Tensor) -> Tensor:
        self.scale *= 0.5
        return h * self.scale


class TryExcept(Broken):
    def between(self, h: Tensor) -> Tensor:
        try:
            if h.sum().item() > -1e9:
                raise ValueError("always")
        except ValueError:
            h = h * 2
        return h


class Callback(Broken):
    """Calls a function that Dynamo is told not to look into."""

    def between(self, h: Tensor) -> Tensor:
        found: Tensor = _outside(h)
        return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside(h: Tensor) -> Tensor:
    return h.sin()


class InLayer(nn.Module):
    """A break inside the second of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), Branch(), nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class WithDropout(Branch):
    def between(self, h: Tensor) -> Tensor:
        return nn.functional.dropout(h, 0.5)


class WithBuffer(nn.Module):
    """Batch statistics on both sides of a break."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        h = self.layer(self.before(x))
        if h.sum() > 1e9:
            return h
        return self.after(h)


class Experts(nn.Module):
    """Routes every row to one expert, expert by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            if len(rows) > 0:
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


MODELS: tuple[Callable[[], nn.Module], ...] = (
    ExplicitBreak,
    Branch,
    EarlyReturn,
    Item,
    Loop,
    ToList,
    ToNumpy,
    Nonzero,
    Print,
    Warn,
    Log,
    CountCalls,
    KeepNumbers,
    KeepOutput,
    CacheOnce,
    Anneal,
    TryExcept,
    Callback,
    InLayer,
    WithDropout,
    WithBuffer,
    Experts,
)


def subjects() -> Iterator[Subject]:
    """Every model in train and eval mode."""
    for model in MODELS:
        for training in (True, False):
            mode = "train" if training else "eval"
            name = getattr(model, "__name__", "model")
            yield Subject(f"{name} {mode}", _builder(model, training), _call)


def _builder(model: Callable[[], nn.Module], training: bool) -> Callable[[], nn.Module]:
    return lambda: model().train(training)


def _call() -> Call:
    return (torch.randn(6, 8, requires_grad=True),), {}
