"""What the kernels themselves take more where a convolution's backward is divided.

Both gradients of a convolution come from one call in autograd, which reads the gradient of the
output once into the cache for both. Divided, the second call reads it again.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..results import Rows, table
from .clock import elapsed
from .models import Subject
from .settings import Settings

_MODEL = "resnet"
_BOTH, _INPUT, _WEIGHT = [True, True, False], [True, False, False], [False, True, False]

LAYOUTS = {"": torch.contiguous_format, ", channels last": torch.channels_last}

Call = Callable[[list[bool]], object]


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each layout of tensors and number of threads."""
    subject = settings.subject(_MODEL)
    for threads, (layout, form) in itertools.product(settings.threads, LAYOUTS.items()):
        torch.set_num_threads(threads)
        calls = _backward_calls(subject, form)
        found: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(settings.rounds + 2):
            for name, way in WAYS.items():
                found[name].append(elapsed(functools.partial(way, calls), subject.x.device))
        ms = {name: statistics.median(each[2:]) for name, each in found.items()}
        plural = "s" if threads > 1 else ""
        yield {"name": f"{_MODEL}{layout}, {threads} thread{plural}", "ms": ms}


def render(rows: Rows) -> str:
    """A table; the last column is what dividing alone costs."""
    one, _, apart = WAYS
    lines = [
        [
            row["name"],
            *(f"{row['ms'][name]:.1f}" for name in WAYS),
            f"{row['ms'][apart] / row['ms'][one]:.3f}",
        ]
        for row in rows
    ]
    return table(["ms", *WAYS, f"{apart} / {one}"], lines)


def _backward_calls(subject: Subject, layout: torch.memory_format) -> list[Call]:
    """Every convolution's backward operator on the model's own tensors, in backward order."""
    seen: list[tuple[nn.Conv2d, Tensor, Tensor]] = []
    hooks = [
        part.register_forward_hook(
            lambda part, given, made: seen.append((part, given[0].detach(), torch.randn_like(made)))
        )
        for part in subject.module.modules()
        if isinstance(part, nn.Conv2d)
    ]
    with torch.no_grad():
        subject.module(subject.x)
    for hook in hooks:
        hook.remove()
    return [
        _call(part, *(each.contiguous(memory_format=layout) for each in (x, grad, part.weight)))
        for part, x, grad in reversed(seen)
    ]


def _call(part: nn.Conv2d, x: Tensor, grad: Tensor, weight: Tensor) -> Call:
    weight, form = weight.detach(), (part.stride, part.padding, part.dilation)

    def call(mask: list[bool]) -> object:
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None, *form, False, [0, 0], part.groups, mask
        )

    return call


def _one_call(calls: list[Call]) -> None:
    for call in calls:
        call(_BOTH)


def _in_turn(calls: list[Call]) -> None:
    for call in calls:
        call(_INPUT)
        call(_WEIGHT)


def _apart(calls: list[Call]) -> None:
    for mask in (_INPUT, _WEIGHT):
        for call in calls:
            call(mask)


WAYS = {"one call": _one_call, "two in turn": _in_turn, "all dX, then all dW": _apart}
