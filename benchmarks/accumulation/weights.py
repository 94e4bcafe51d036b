"""Ws of several microbatches of one stage, one thread: a linear layer, and stages of models."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import autosplit

from ..paper.stages import middle
from ..peak import peak_bytes
from ..pipeline.turns import take_turns
from ..results import Rows, ratios, table
from ..split.models import Subject
from .settings import Sampled, Settings

WAYS: Mapping[str, str | int] = {
    "exact": "exact",
    "fused": "fused",
    "joined": 2**30,  # whatever the rows
    "auto": "auto",
}
"""Name in the tables -> ``accumulation=``."""

WARM_UP = 2  # rounds


def measure_layers(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each width, number of rows and number of microbatches."""
    torch.set_num_threads(1)
    for width in settings.widths:
        for rows in settings.rows:
            torch.manual_seed(0)
            x = torch.randn(rows, width)
            subject = Subject("", nn.Linear(width, width, bias=False), x, torch.randn(rows, width))
            for count in settings.counts:
                name = f"{count} x {rows} rows, width {width}"
                yield {"name": name, **_measure(subject, count, settings)}


def measure_models(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family and number of samples in a microbatch."""
    torch.set_num_threads(1)
    for family in settings.families:
        for samples in settings.samples:
            subject = middle(family, Sampled(settings, samples))
            for count in settings.counts:
                name = f"{family}, {count} x {samples} samples"
                yield {"name": name, **_measure(subject, count, settings)}


def _measure(subject: Subject, count: int, settings: Settings) -> dict[str, Any]:
    """Seconds of the Ws of a step by each way in each round, the most bytes that they allocate, and
    the distance of their gradients from the exact ones.
    """
    x = subject.x.detach().requires_grad_(subject.name != "")
    stages = {
        way: autosplit.Stage(subject.module, [x], accumulation=accumulation)
        for way, accumulation in WAYS.items()
    }
    turns = {way: partial(_seconds, stage, subject, count) for way, stage in stages.items()}
    seconds = take_turns(turns, settings.rounds, WARM_UP)
    gradients, peaks = {}, {}
    for way, stage in stages.items():
        _run_to_weights(stage, subject, count)
        peaks[way] = peak_bytes(partial(stage.backward_weight, *range(count)))
        gradients[way] = dict(stage.gradients)
        stage.reset()
    return {
        "seconds": seconds,
        "peak": peaks,
        "gap": {way: _distance(gradients["exact"], gradients[way]) for way in WAYS},
    }


def _run_to_weights(stage: autosplit.Stage, subject: Subject, count: int) -> None:
    for at in range(count):
        stage.forward(at, [subject.x.clone()])
        stage.backward_input(at, [subject.grad.clone()])


def _seconds(stage: autosplit.Stage, subject: Subject, count: int) -> float:
    """CPU time of the thread, which other processes of the machine disturb less."""
    _run_to_weights(stage, subject, count)
    start = time.thread_time()
    stage.backward_weight(*range(count))
    seconds = time.thread_time() - start
    stage.reset()
    return seconds


def _distance(exact: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> float:
    """The largest difference of two gradients, relative to the largest element of all. Gradients
    that are zero but for rounding, as of the bias of attention's keys, have no scale of their own.
    """
    differences = [float((gradients[n] - gradient).abs().max()) for n, gradient in exact.items()]
    return max(differences) / max(float(gradient.abs().max()) for gradient in exact.values())


def render(rows: Rows) -> str:
    """Milliseconds of the exact Ws, the other ways over them, MiB and rounding."""
    exact, *ways = WAYS
    cells = []
    for row in rows:
        seconds, peaks = row["seconds"], row["peak"]
        times = (f"{median(ratios(seconds[way], seconds[exact])):.2f}" for way in ways)
        sizes = (f"{peaks[way] / 2**20:.1f}" for way in WAYS)
        gap = max(row["gap"].values())
        exact_ms = f"{1e3 * median(seconds[exact]):.1f}"
        cells.append([row["name"], exact_ms, *times, *sizes, f"{gap:.0e}"])
    headers = ["", "exact, ms", *(f"{way} / exact" for way in ways)]
    return table([*headers, *(f"{way}, MiB" for way in WAYS), "largest difference"], cells)
