"""Ws of a linear layer beside the same operators of torch without a stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autosplit

from ..pipeline.turns import take_turns
from ..results import Rows, table
from ..split.models import Subject
from .settings import Settings
from .weights import WARM_UP, WAYS, medians, rounds_of, seconds_of

WAYS_BY_HAND = ("exact", "joined")
RATIOS = {"joined": "exact", "joined by hand": "exact by hand"}


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each width, number of rows and number of microbatches."""
    torch.set_num_threads(1)
    for width in settings.widths:
        for rows in settings.rows:
            torch.manual_seed(0)
            x, grad = torch.randn(rows, width), torch.randn(rows, width)
            subject = Subject("", nn.Linear(width, width, bias=False), x, grad)
            for count in settings.counts:
                turns = _turns(subject, count)
                seconds = take_turns(turns, rounds_of(turns, settings), WARM_UP)
                name = f"{count} x {rows} rows, width {width}"
                yield {"name": name, **medians(seconds, RATIOS)}


def _turns(subject: Subject, count: int) -> Mapping[str, Callable[[], float]]:
    """The Ws of a step by a stage and by hand."""
    stages = {
        way: autosplit.Stage(subject.module, [subject.x], accumulation=WAYS[way])
        for way in WAYS_BY_HAND
    }
    factors = [(subject.grad.clone(), subject.x.clone()) for _ in range(count)]
    total = torch.zeros_like(subject.module.weight)  # type: ignore[arg-type]
    return {
        **{way: partial(seconds_of, stage, subject, count) for way, stage in stages.items()},
        "exact by hand": partial(_seconds, partial(_add, factors, total)),
        "joined by hand": partial(_seconds, partial(_add_joined, factors, total)),
    }


def _add(factors: Sequence[tuple[Tensor, Tensor]], total: Tensor) -> None:
    for grad, x in factors:
        total.add_(grad.t() @ x)


def _add_joined(factors: Sequence[tuple[Tensor, Tensor]], total: Tensor) -> None:
    grads, inputs = zip(*factors, strict=True)
    total.addmm_(torch.cat(grads).t(), torch.cat(inputs))


@torch.no_grad()
def _seconds(call: Callable[[], None]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def render(rows: Rows) -> str:
    """Milliseconds of all four, and joined over exact, by a stage and by hand."""
    names = [f"{way}{where}" for way in WAYS_BY_HAND for where in ("", " by hand")]
    cells = []
    for row in rows:
        times = (f"{1e3 * row['seconds'][name]:.1f}" for name in names)
        cells.append([row["name"], *times, *(f"{row['ratios'][name]:.2f}" for name in RATIOS)])
    gains = ["joined / exact", "joined / exact, by hand"]
    return table(["", *(f"{name}, ms" for name in names), *gains], cells)
