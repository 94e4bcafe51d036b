"""Metrics: what a function of the user's finds in the last stage's outputs, beside the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autosplit.errors import PipelineError

MetricFunction: TypeAlias = Callable[[Any, Any], Mapping[str, Any]]
"""``metric_fn(output, targets)``: numbers, or tensors of one, by name."""


class MetricObserver:
    """Looks at outputs and targets of one microbatch after the other, while there is a metric."""

    def __init__(self) -> None:
        self._metric_fn: MetricFunction | None = None
        self._found: list[dict[str, float]] = []

    def __call__(self, output: Any, targets: Any) -> None:
        if self._metric_fn is not None:
            self._found.append(_numbers(self._metric_fn(output, targets)))

    @contextlib.contextmanager
    def finding(self, metric_fn: MetricFunction) -> Iterator[list[dict[str, float]]]:
        """Inside, the metric looks on; gives what it has found, a microbatch each."""
        self._metric_fn, self._found = metric_fn, []
        try:
            yield self._found
        finally:
            self._metric_fn = None


def by_name(found: Sequence[Mapping[int, Mapping[str, float]]]) -> dict[str, Tensor]:
    """What each rank has found in its microbatches, as a tensor of shape [M] a name.

    Raises:
        PipelineError: other names in one microbatch than in another.
    """
    rows = {microbatch: each for part in found for microbatch, each in part.items()}
    names = list(rows[0])
    for microbatch in sorted(rows):
        if list(rows[microbatch]) != names:
            raise PipelineError(
                f"metric_fn gave {', '.join(names) or 'nothing'} for microbatch 0 and "
                f"{', '.join(rows[microbatch]) or 'nothing'} for microbatch {microbatch}: let it "
                "give the same names for all"
            )
    return {
        name: torch.tensor([rows[at][name] for at in sorted(rows)], dtype=torch.float64)
        for name in names
    }


def _numbers(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise PipelineError(
            "metric_fn(output, targets) gives a dictionary of numbers, such as {'correct': "
            f"...sum()}}; got a {type(given).__name__}"
        )
    found = {}
    for name, value in given.items():
        if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
            shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
            raise PipelineError(
                f"metric_fn gave a {type(value).__name__}{shape} as {name!r}; expected a number, "
                "or a tensor of one: reduce it, for example to a sum"
            )
        found[str(name)] = float(value)
    return found
