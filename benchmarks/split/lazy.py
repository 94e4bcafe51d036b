"""What it costs that pending gradients are right without a call: lazy gradients in ``.grad``."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import autosplit

from ..results import Rows, Target, table, verdicts
from .models import Settings

WIDTH, BATCH = 8, 4
LAYERS = 100  # with a weight and a bias each
TURNS = 200
COST = Target("a step, us", at_most=200.0, style=".0f")
_WARMUP = 5


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each way in which gradients are used, with the first number of threads."""
    torch.set_num_threads(settings.threads[0])
    for name, use in _USES.items():
        yield {"name": name, **_cost(use, settings.device)}


def _call(split: autosplit.SplitModule) -> None:
    split.backward_weight()


def _list(split: autosplit.SplitModule) -> None:
    """Holds the lazy gradients in a list while they are computed."""
    grads = [each.grad for each in split.parameters() if each.grad is not None]
    torch._foreach_norm(grads)


def _clip_and_step(split: autosplit.SplitModule) -> None:
    """The same as training has it: what held them is gone before the step."""
    nn.utils.clip_grad_norm_(split.parameters(), 1.0)
    torch.optim.SGD(split.parameters(), lr=0.0).step()


_USES: dict[str, Callable[[autosplit.SplitModule], None]] = {
    "backward_weight()": _call,
    "a list of .grad": _list,
    "clipping and a step": _clip_and_step,
}


class _Clock:
    """Adds up the time inside the calls that lazy gradients add to a step."""

    def __init__(self, lazies: Any) -> None:
        self.seconds = 0.0
        self._inside = False
        for name in ("promise", "lift", "settle", "sweep"):
            setattr(lazies, name, self._timed(getattr(lazies, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            before = time.thread_time()  # not what else the machine does meanwhile
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - before
                self._inside = False

        return timed


def _cost(use: Callable[[autosplit.SplitModule], None], device: str) -> dict[str, Any]:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(device)
    x = torch.randn(BATCH, WIDTH, device=device)
    split = autosplit.split(model, (x,))
    clock = _Clock(split._queue.lazies)
    inside, steps = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(_WARMUP + TURNS):
            clock.seconds, before = 0.0, time.perf_counter()
            split(x).sum().backward()
            use(split)
            split.zero_grad()
            steps.append(1e6 * (time.perf_counter() - before))
            inside.append(1e6 * clock.seconds)
    finally:
        gc.enable()
    return {
        "cost": statistics.median(inside[_WARMUP:]),
        "step": statistics.median(steps[_WARMUP:]),
        "parameters": 2 * LAYERS,
    }


def render(rows: Rows) -> str:
    """A table and a verdict."""
    lines = [
        [row["name"], row["parameters"], f"{row['step']:.0f}", COST.cell(row["cost"])]
        for row in rows
    ]
    verdict = verdicts([(COST, {row["name"]: row["cost"] for row in rows})])
    head = ["gradients are used by", "parameters", "step, us", COST.title]
    return table(head, lines) + "\n\n" + verdict
