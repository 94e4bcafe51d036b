"""Ws of several microbatches of one stage, one thread: a linear layer, small modules, and stages of
models.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import autosplit
from autosplit.torch_internals.allocations import allocations_on

from ..paper.stages import middle
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


def _convolutions(count: int, channels: int) -> nn.Module:
    layers = [
        layer
        for _ in range(count)
        for layer in (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
    ]
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(channels, channels))


def _norms(count: int, width: int) -> nn.Module:
    layers = [(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*[layer for group in layers for layer in group])


def _embedding(padding: int | None) -> nn.Module:
    return nn.Sequential(nn.Embedding(3000, 256, padding_idx=padding), nn.LayerNorm(256))


def small_modules() -> Mapping[str, tuple[nn.Module, Tensor]]:
    """Modules in which few products compute gradients, with inputs of a microbatch."""
    tokens = torch.randint(0, 3000, (4096,))
    return {
        "20 convolutions, a layer; 1 image": (_convolutions(20, 8), torch.randn(1, 8, 16, 16)),
        "20 convolutions, a layer; 4 images": (_convolutions(20, 8), torch.randn(4, 8, 16, 16)),
        "6 layers and norms; 16 rows": (_norms(6, 64), torch.randn(16, 64)),
        "6 layers and norms; 256 rows": (_norms(6, 64), torch.randn(256, 64)),
        "embedding; 4096 tokens": (_embedding(None), tokens),
        "embedding with padding; 4096 tokens": (_embedding(0), tokens),
        "embedding with padding; 512 tokens": (_embedding(0), tokens[:512]),
    }


def measure_small(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each small module and number of microbatches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for title, (module, x) in small_modules().items():
        subject = Subject(title, module, x, torch.randn(module(x).shape))
        for count in settings.counts:
            yield {"name": f"{count} x {title}", **_measure(subject, count, settings)}


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
    """Medians of the Ws of a step by each way, the most bytes that they allocate, and the distance
    of their gradients from the exact ones.
    """
    needs_input_grad = subject.name != "" and subject.x.is_floating_point()
    x = subject.x.detach().requires_grad_(needs_input_grad)
    stages = {
        way: autosplit.Stage(subject.module, [x], accumulation=accumulation)
        for way, accumulation in WAYS.items()
    }
    turns = {way: partial(seconds_of, stage, subject, count) for way, stage in stages.items()}
    gradients, peaks = {}, {}
    for way, stage in stages.items():
        seconds_of(stage, subject, count)
        peaks[way], gradients[way] = _peak_and_gradients(stage, subject, count)
    gc.collect()
    gc.disable()
    try:
        seconds = take_turns(turns, rounds_of(turns, settings), WARM_UP)
    finally:
        gc.enable()
    return {
        **medians(seconds, dict.fromkeys(WAYS, "exact")),
        "peak": peaks,
        "gap": {way: _distance(gradients["exact"], gradients[way]) for way in WAYS},
    }


def medians(
    seconds: Mapping[str, Sequence[float]], over: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Medians over the rounds: of each way's seconds, and of their ratios to another way's.

    Args:
        seconds: by way, the seconds of each round.
        over: by way, the other way.
    """
    return {
        "seconds": {way: median(rounds) for way, rounds in seconds.items()},
        "ratios": {way: median(ratios(seconds[way], seconds[base])) for way, base in over.items()},
    }


def rounds_of(turns: Mapping[str, Callable[[], float]], settings: Settings) -> int:
    """The number of rounds that take ``settings.seconds``, or ``settings.rounds`` if more."""
    start = time.perf_counter()
    for turn in turns.values():
        turn()
    seconds = time.perf_counter() - start
    return max(settings.rounds, int(settings.seconds / seconds))


def _run_to_weights(stage: autosplit.Stage, subject: Subject, count: int) -> None:
    for at in range(count):
        stage.forward(at, [subject.x.clone()])
        stage.backward_input(at, [subject.grad.clone()])


def seconds_of(stage: autosplit.Stage, subject: Subject, count: int) -> float:
    """CPU time of the thread, which other processes of the machine disturb less."""
    _run_to_weights(stage, subject, count)
    start = time.thread_time()
    stage.backward_weight(*range(count))
    seconds = time.thread_time() - start
    stage.reset()
    return seconds


def _peak_and_gradients(
    stage: autosplit.Stage, subject: Subject, count: int
) -> tuple[int, Mapping[str, Tensor]]:
    """The peak of the Ws in bytes, above what is allocated when they begin, and the gradients.

    The counter starts before the forwards, because it counts the releases only of memory whose
    allocation it has seen.
    """
    with allocations_on(torch.device("cpu")) as allocations:
        allocations.mark()
        _run_to_weights(stage, subject, count)
        allocations.mark()
        stage.backward_weight(*range(count))
        allocations.mark()
    gradients = dict(stage.gradients)
    stage.reset()
    before, during, _ = allocations.stretches()
    return during.highest - before.end, gradients


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
        peaks = row["peak"]
        times = (f"{row['ratios'][way]:.2f}" for way in ways)
        sizes = (f"{peaks[way] / 2**20:.1f}" for way in WAYS)
        gap = max(row["gap"].values())
        exact_ms = f"{1e3 * row['seconds'][exact]:.1f}"
        cells.append([row["name"], exact_ms, *times, *sizes, f"{gap:.0e}"])
    headers = ["", "exact, ms", *(f"{way} / exact" for way in ways)]
    return table([*headers, *(f"{way}, MiB" for way in WAYS), "largest difference"], cells)
