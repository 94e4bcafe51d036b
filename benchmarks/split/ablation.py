"""W of several pending microbatches: added up by the caller or in the graph, whole or in slices."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import autosplit
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import EXACT, Accumulation
from autosplit.runtime.residuals import Residuals

from ..results import Rows, table
from .clock import elapsed
from .meter import extra
from .models import Settings, Subject

COUNTS = (1, 2, 4, 8)
SLICES = 4
_WARMUP = 2

# Adds the weight gradients of microbatches to the sums, which hold earlier ones already.
Way = Callable[[SplitFunctions, Sequence[Residuals], Sequence[Tensor]], None]


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model and number of microbatches, with the first number of threads."""
    torch.set_num_threads(settings.threads[0])
    for model in settings.models:
        yield from measure_subject(settings.subject(model), settings.rounds)


def measure_subject(
    subject: Subject, rounds: int, counts: Sequence[int] = COUNTS
) -> Iterator[dict[str, Any]]:
    """A row for each number of microbatches."""
    example = subject.x.detach().clone().requires_grad_()
    functions = autosplit.Stage(subject.module, [example]).functions
    for count in counts:
        yield {
            "name": f"{subject.name}, {count} microbatch{'es' if count > 1 else ''}",
            "ways": _compare(functions, subject, count, rounds),
        }
        gc.collect()


@torch.no_grad()
def _compare(
    functions: SplitFunctions, subject: Subject, count: int, rounds: int
) -> dict[str, dict[str, float]]:
    pending = deferred(functions, subject, count)
    sums = [
        torch.zeros_like(subject.module.get_parameter(name)) for name in functions.parameter_names
    ]
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(_WARMUP + rounds):
        for name, way in WAYS.items():
            again = [each.again() for each in pending]
            times[name].append(elapsed(lambda: way(functions, again, sums), subject.x.device))  # noqa: B023
    del pending
    baseline = times[next(iter(WAYS))][_WARMUP:]
    found = {}
    for name, way in WAYS.items():
        mine = times[name][_WARMUP:]
        ratios = [a / b for a, b in zip(mine, baseline, strict=True)]
        found[name] = {
            "ms": statistics.median(mine),
            "ratio": statistics.median(ratios),
            "extra": extra(
                lambda: deferred(functions, subject, count),
                lambda pending: way(functions, pending, sums),  # noqa: B023
                subject.x.device,
            ),
        }
    return found


def deferred(functions: SplitFunctions, subject: Subject, count: int) -> list[Residuals]:
    """F and I of some microbatches; what they leave for W."""
    state = {**dict(subject.module.named_parameters()), **dict(subject.module.named_buffers())}
    found = []
    for _ in range(count):
        saved = functions.forward(state, [subject.x.clone()]).saved
        found.append(functions.backward_input(saved, [subject.grad.clone()])[1])
    return found


def _by_the_caller(
    functions: SplitFunctions, pending: Sequence[Residuals], sums: Sequence[Tensor]
) -> None:
    for each in pending:
        for total, gradient in zip(sums, functions.backward_weight(each), strict=True):
            total.add_(gradient)


def _in_the_graph(accumulation: Accumulation) -> Way:
    def way(
        functions: SplitFunctions, pending: Sequence[Residuals], sums: Sequence[Tensor]
    ) -> None:
        for each in pending:
            functions.backward_weight(each, sums, accumulation)

    return way


def _concatenated(
    functions: SplitFunctions, pending: Sequence[Residuals], sums: Sequence[Tensor]
) -> None:
    functions.backward_weight_together(pending, sums, Accumulation("concatenated"))


def _sliced(
    functions: SplitFunctions, pending: Sequence[Residuals], sums: Sequence[Tensor]
) -> None:
    weight = functions.sliced(SLICES)
    at = dict(zip(functions.parameter_names, sums, strict=True))
    for each in pending:
        left = each
        for index, names in enumerate(weight.parameter_names):
            _, left = weight.run(index, left, [at[name] for name in names], EXACT)


WAYS: Mapping[str, Way] = {
    "one by one": _by_the_caller,
    "accumulated": _in_the_graph(EXACT),
    "accumulated, fused": _in_the_graph(Accumulation("fused")),
    "concatenated": _concatenated,
    f"{SLICES} slices": _sliced,
}


def render(rows: Rows) -> str:
    """Two tables: time over that of one by one, and memory."""
    names = list(WAYS)
    times = [
        [
            row["name"],
            f"{row['ways'][names[0]]['ms']:.1f}",
            *(f"{row['ways'][name]['ratio']:.3f}" for name in names[1:]),
        ]
        for row in rows
    ]
    memory = [
        [row["name"], *(f"{row['ways'][name]['extra'] / 2**20:.1f}" for name in names)]
        for row in rows
    ]
    first, *others = names
    return "\n\n".join(
        [
            table(["time", f"{first} ms", *(f"{name} / {first}" for name in others)], times),
            table(["MiB on top", *names], memory),
        ]
    )
