"""What the autograd face costs over the functional one, on modules that compute next to nothing."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autosplit

from ..pipeline.turns import take_turns
from ..results import Rows, Target, table, verdicts
from .models import Settings

WIDTH, BATCH = 8, 4
LAYERS = 100
TURNS = 25
IN_A_ROW = 15
OVERHEAD = Target("SplitModule - Stage, us", at_most=100.0, style=".0f")
_WARMUP = 2

Microbatch = Callable[[Tensor, Tensor], None]


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each module, with the first number of threads."""
    torch.set_num_threads(settings.threads[0])
    for name, module in _modules().items():
        yield {"name": name, **_compare(module.to(settings.device), settings.device, TURNS)}


def _modules() -> dict[str, nn.Module]:
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    stack = nn.Sequential(*layers)
    count = sum(1 for _ in stack.modules())
    return {"one Linear": nn.Linear(WIDTH, WIDTH), f"{count} modules": stack}


def _compare(module: nn.Module, device: str, turns: int) -> dict[str, Any]:
    """Medians of each, and of the difference within a turn.

    A contender's turn is several microbatches in a row, as in training: after another's, its
    first one finds the caches cold, which takes longer than what is to be measured.
    """
    x = torch.randn(BATCH, WIDTH, device=device, requires_grad=True)
    grad = torch.ones(BATCH, WIDTH, device=device)
    ways = {
        name: partial(_in_a_row, each, module, x, grad)
        for name, each in _contenders(module, x).items()
    }
    gc.collect()
    gc.disable()
    try:
        times = take_turns(ways, turns, _WARMUP)
    finally:
        gc.enable()
    pairs = zip(times["SplitModule"], times["Stage"], strict=True)
    return {
        "us": {name: statistics.median(each) for name, each in times.items()},
        "overhead": statistics.median([mine - theirs for mine, theirs in pairs]),
    }


def _in_a_row(microbatch: Microbatch, module: nn.Module, x: Tensor, grad: Tensor) -> float:
    """The fastest of one turn: what else the machine does only adds."""
    times = []
    for _ in range(IN_A_ROW):
        times.append(_microseconds(microbatch, x, grad))
        module.zero_grad()
        x.grad = None
    return min(times)


class _Bare(torch.autograd.Function):
    """The least that brings ``backward()`` to I: no check of anything."""

    @staticmethod
    def forward(ctx: Any, stage: autosplit.Stage, x: Tensor) -> Tensor:
        ctx.stage = stage
        return stage.forward(0, [x])[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        return None, ctx.stage.backward_input(0, [grad])[0]


def _contenders(module: nn.Module, x: Tensor) -> Mapping[str, Microbatch]:
    split, stage = autosplit.split(module, (x,)), autosplit.Stage(module, [x])
    guards = split.functions[0].capture.guards

    def by_autograd(x: Tensor, grad: Tensor) -> None:
        split(x).backward(grad)
        split.backward_weight()

    def by_calls(x: Tensor, grad: Tensor) -> None:
        stage.forward(0, [x])
        stage.backward_input(0, [grad])
        stage.backward_weight(0)
        stage.publish()

    def by_bare_function(x: Tensor, grad: Tensor) -> None:
        _Bare.apply(stage, x).backward(grad)  # type: ignore[no-untyped-call]
        stage.backward_weight(0)
        stage.publish()

    return {
        "autograd": lambda x, grad: module(x).backward(grad),
        "SplitModule": by_autograd,
        "bare Function": by_bare_function,
        "Stage": by_calls,
        "guards": lambda x, grad: guards.hold((x,), {}) and None,
    }


def _microseconds(microbatch: Microbatch, x: Tensor, grad: Tensor) -> float:
    before = time.perf_counter()
    microbatch(x, grad)
    return 1e6 * (time.perf_counter() - before)


def render(rows: Rows) -> str:
    """A table and a verdict."""
    # Rows of an earlier run may lack a contender.
    names = [name for name in rows[0]["us"] if all(name in row["us"] for row in rows)]
    lines = [
        [row["name"], *(f"{row['us'][name]:.0f}" for name in names), OVERHEAD.cell(row["overhead"])]
        for row in rows
    ]
    verdict = verdicts([(OVERHEAD, {row["name"]: row["overhead"] for row in rows})])
    return table(["us", *names, OVERHEAD.title], lines) + "\n\n" + verdict
