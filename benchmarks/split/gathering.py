"""Gradient accumulation of whole models on one device: k microbatches, their sum in ``.grad``."""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import autosplit
from examples.families import FAMILIES

from ..results import Rows, table
from .clock import elapsed
from .meter import extra
from .models import SIZES, Settings
from .steps import difference

COUNTS = (1, 2, 4, 8)
_WARMUP = 2
_BASELINE = "autograd"


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole model, from token ids or images to its loss, and one microbatch."""

    name: str
    module: nn.Module
    inputs: Tensor
    targets: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor]


# A step of so many microbatches, which adds their gradients to ``.grad``.
Way = Callable[[int], None]


def whole(name: str, settings: Settings) -> Whole:
    """The same weights and data on every call, in training mode."""
    family = FAMILIES[name](**dataclasses.asdict(SIZES[settings.size][name]))
    dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
    module = family.build().to(settings.device, dtype).train()
    (inputs,) = family.example()
    # Random inputs need no better targets: ids for ids, the first class for an image.
    targets = torch.zeros(len(inputs), dtype=torch.int64) if inputs.is_floating_point() else inputs
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    inputs, targets = inputs.to(settings.device), targets.to(settings.device)
    return Whole(name, module, inputs, targets, family.loss_fn)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model and number of microbatches, with the first number of threads."""
    torch.set_num_threads(settings.threads[0])
    for model in settings.models:
        yield from measure_whole(whole(model, settings), settings.rounds)


def measure_whole(
    subject: Whole, rounds: int, counts: Sequence[int] = COUNTS
) -> Iterator[dict[str, Any]]:
    """A row for each number of microbatches."""
    ways = _ways(subject)
    expected: dict[str, Tensor] = {}
    for count in counts:
        differences = {}
        for name, way in ways.items():
            way(count)  # what is compiled for this number is
            found = _gradients_of(subject, way, count)
            expected = found if name == _BASELINE else expected
            differences[name] = difference(found, expected)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_WARMUP + rounds):
            for name, way in ways.items():
                times[name].append(elapsed(lambda: way(count), subject.inputs.device))  # noqa: B023
        yield {
            "name": f"{subject.name}, {count} microbatch{'es' if count > 1 else ''}",
            "ways": {
                name: {
                    "ms": statistics.median(taken[_WARMUP:]),
                    "ratio": statistics.median(
                        mine / theirs
                        for mine, theirs in zip(
                            taken[_WARMUP:], times[_BASELINE][_WARMUP:], strict=True
                        )
                    ),
                    "extra": extra(
                        lambda: None,
                        lambda _: ways[name](count),  # noqa: B023
                        subject.inputs.device,
                    ),
                    "difference": differences[name],
                }
                for name, taken in times.items()
            },
        }
        gc.collect()


def _ways(subject: Whole) -> dict[str, Way]:
    exact = autosplit.split(subject.module, fullgraph=True, max_pending=math.inf)
    together = autosplit.split(subject.module, fullgraph=True, accumulation="concatenated")

    def backward(model: nn.Module) -> None:
        subject.loss_fn(model(subject.inputs), subject.targets).backward()

    def plain(count: int) -> None:
        for _ in range(count):
            backward(subject.module)

    def each(count: int) -> None:
        for _ in range(count):
            backward(exact)
            exact.backward_weight()

    def last(model: autosplit.SplitModule) -> Way:
        def way(count: int) -> None:
            for _ in range(count):
                backward(model)
            model.backward_weight()

        return way

    return {
        _BASELINE: plain,
        "W each": each,
        "W last": last(exact),
        "concatenated": last(together),
    }


def _gradients_of(subject: Whole, way: Way, count: int) -> dict[str, Tensor]:
    """By name, of one step; the sums stay, for steps that are measured add to them."""
    for parameter in subject.module.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    way(count)
    named = subject.module.named_parameters()
    return {name: each.grad.clone() for name, each in named if each.grad is not None}


def render(rows: Rows) -> str:
    """Two tables: time over autograd's, and memory."""
    names = list(rows[0]["ways"])
    first, *others = names
    times = [
        [
            row["name"],
            f"{row['ways'][first]['ms']:.1f}",
            *(f"{row['ways'][name]['ratio']:.3f}" for name in others),
            f"{row['ways'][names[-1]]['difference']:.0e}",
        ]
        for row in rows
    ]
    memory = [
        [row["name"], *(f"{row['ways'][name]['extra'] / 2**20:.1f}" for name in names)]
        for row in rows
    ]
    titles = ["time", f"{first} ms", *(f"{name} / {first}" for name in others)]
    return "\n\n".join(
        [
            table([*titles, "difference of the last"], times),
            table(["MiB on top", *names], memory),
        ]
    )
