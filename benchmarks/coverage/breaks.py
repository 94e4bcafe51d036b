"""Models that no single graph holds: data-dependent branches, Python side effects, prints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .subject import Call, Subject

Between = Callable[[Any, Tensor], Any]


class Broken(nn.Module):
    """Two layers with something in between."""

    last: Tensor | None = None
    cached: Tensor | None = None

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.calls = 0
        self.seen: list[float] = []
        self.scale = 1.0
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self, torch.tanh(self.first(x))))


def explicit_break(own: Any, h: Tensor) -> Tensor:
    torch.compiler.disable(lambda: None)()
    return h


def loop(own: Any, h: Tensor) -> Any:
    """Repeats a layer as often as the data says."""
    for _ in range(int(h.detach().abs().sum()) % 3 + 1):
        h = torch.tanh(own.second(h))
    return h


def printed(own: Any, h: Tensor) -> Tensor:
    print("mean", end="\r")
    return h


def warn(own: Any, h: Tensor) -> Tensor:
    warnings.warn("in the forward", stacklevel=2)
    return h


def log(own: Any, h: Tensor) -> Tensor:
    logging.getLogger("a model").debug("in the forward")
    return h


def count_calls(own: Any, h: Tensor) -> Any:
    """Python state that is written and read."""
    own.calls += 1
    return h * own.calls


def keep_numbers(own: Any, h: Tensor) -> Any:
    own.seen.append(float(h.detach().mean()))
    return h * len(own.seen)


def keep_output(own: Any, h: Tensor) -> Any:
    """Adds what the last call left behind."""
    found = h if own.last is None else h + own.last
    own.last = h.detach()
    return found


def cache_once(own: Any, h: Tensor) -> Any:
    if own.cached is None:
        own.cached = torch.arange(8.0)
    return h * own.cached


def anneal(own: Any, h: Tensor) -> Any:
    """Reads an attribute that it changes."""
    own.scale *= 0.5
    return h * own.scale


def try_except(own: Any, h: Tensor) -> Any:
    try:
        if h.sum().item() > -1e9:
            raise ValueError("always")
    except ValueError:
        h = h * 2
    return h


@torch.compiler.disable  # type: ignore[untyped-decorator]
def callback(own: Any, h: Tensor) -> Any:
    """A function that Dynamo is told not to look into."""
    return h.sin()


BETWEEN: dict[str, Between] = {
    "ExplicitBreak": explicit_break,
    "Item": lambda own, h: h * float(h.detach().abs().max()),
    "Loop": loop,
    "ToList": lambda own, h: h * max(h.detach()[0].tolist()),
    "ToNumpy": lambda own, h: h + float(h.detach().numpy().std()),
    "Nonzero": lambda own, h: h[h[:, 0] > 0],  # how many rows is not known before
    "Print": printed,
    "Warn": warn,
    "Log": log,
    "CountCalls": count_calls,
    "KeepNumbers": keep_numbers,
    "KeepOutput": keep_output,
    "CacheOnce": cache_once,
    "Anneal": anneal,
    "TryExcept": try_except,
    "Callback": callback,
}


class Branch(nn.Module):
    """Takes one of two layers by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        h = nn.functional.dropout(torch.tanh(self.first(x)), 0.5)
        return self.second(h) if h.sum() > 0 else self.first(h)


class EarlyReturn(Branch):
    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        if h.abs().max() > 1e6:
            return h
        return self.second(h)


class InLayer(nn.Module):
    """A break inside the second of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), Branch(), nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


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


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Broken, between) for name, between in BETWEEN.items()},
    **{each.__name__: each for each in (Branch, EarlyReturn, InLayer, WithBuffer, Experts)},
}


def subjects() -> Iterator[Subject]:
    """Every model in train and eval mode."""
    for name, model in MODELS.items():
        for training in (True, False):
            mode = "train" if training else "eval"
            yield Subject(f"{name} {mode}", _builder(model, training), _call)


def _builder(model: Callable[[], nn.Module], training: bool) -> Callable[[], nn.Module]:
    return lambda: model().train(training)


def _call() -> Call:
    return (torch.randn(6, 8, requires_grad=True),), {}
