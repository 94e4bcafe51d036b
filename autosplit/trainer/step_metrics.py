"""Metrics of a training step: rates, FLOP/s, utilisation, idle time, memory, learning rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autosplit.errors import PipelineError
from autosplit.mesh.costs import data_sheet
from autosplit.pipeline.engine.boundaries import TensorMeta
from autosplit.trainer.agreement import StepReduction
from autosplit.trainer.batch_agreement import Metas, by_microbatch


@dataclass
class StepFigures:
    """The figures of a trainer's last step.

    Attributes:
        reduction: the step's all-reduce, which has the means of losses and the window of recorded
            actions. None before the first step, and after a step that did not wait for losses.
        norm: the norm of the model's gradient; None if it is not computed.
        seconds: the time of the step.
        skipped: the number of steps whose gradients were dropped so far.
    """

    reduction: StepReduction | None = None
    norm: float | None = None
    seconds: float = 0.0
    skipped: int = 0


_RATES = ("samples_per_s", "tokens_per_s", "flops_per_s")
_MEMORY = ("peak_memory", "device_peak_memory")
_NAMES = (
    "loss",
    "seconds",
    "mfu",
    "grad_norm",
    "skipped",
    "scale",
    "marks",
    "lr",
    "idle",
    *_RATES,
    *_MEMORY,
)


def check_part_names(names: Iterable[str]) -> None:
    """Check that no auxiliary loss or part of a loss has the name of another metric.

    Raises:
        PipelineError: names an auxiliary loss or part that has another metric's name.
    """
    seen = {*_NAMES}
    for name in names:
        if name in seen or name.startswith("lr/"):
            raise PipelineError(
                f"{name!r} names a part of the loss, and another metric of the trainer: choose "
                f"another name, such as {name + '_part'!r}"
            )
        seen.add(name)


def batch_counts(metas: Metas) -> dict[str, int]:
    """Count the ``"samples"`` and ``"tokens"`` of a batch; a count that is unknown is left out.

    Tokens are the elements of the first tensor of integers among the inputs, such as token ids.

    Args:
        metas: shapes and dtypes of the batch's tensors, by path.
    """
    counts = dict[str, int]()
    for row in by_microbatch(metas).values():
        sizes = [
            (path, meta.dtype, meta.shape)
            for path, meta in row.items()
            if isinstance(meta, TensorMeta) and meta.shape
        ]
        integers = [
            shape.numel()
            for path, dtype, shape in sizes
            if path.startswith("inputs") and _holds_integers(dtype)
        ]
        for name, numbers in ("samples", [shape[0] for *_, shape in sizes]), ("tokens", integers):
            if numbers:
                counts[name] = counts.get(name, 0) + numbers[0]
    return counts


def _holds_integers(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def peak_rate(device: float | str) -> float:
    """Peak floating-point operations per second.

    Args:
        device: the peak rate in FLOP/s, or the name of a device in ``mesh.costs.DATA_SHEETS``.

    Raises:
        PipelineError: an unknown name, or no positive number.
    """
    if isinstance(device, str):
        return 1e12 * data_sheet(device, PipelineError).teraflops
    if not 0.0 < device < math.inf:
        raise PipelineError(f"peak_flops must be a positive number or a name, got {device!r}")
    return float(device)


def learning_rates(optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """The learning rates by metric name: ``"lr"``, or ``"lr/0"``, ``"lr/1"`` ... if parameter
    groups have different rates.
    """
    rates = [float(g["lr"]) for g in (optimizer.param_groups if optimizer else ()) if "lr" in g]
    if len({*rates}) == 1:
        return {"lr": rates[0]}
    return {f"lr/{number}": rate for number, rate in enumerate(rates)}


def device_peak(device: torch.device) -> dict[str, float]:
    """The metric ``"device_peak_memory"``, the most bytes that an accelerator's allocator has held;
    empty if it does not count them.
    """
    statistic = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return {} if statistic is None else {"device_peak_memory": float(statistic(device))}


def whole_mesh(rows: Sequence[Mapping[str, float]], pipelines: int) -> dict[str, float]:
    """Combine the metrics of all ranks.

    Args:
        rows: the metrics of each rank, by rank.
        pipelines: the number of replicas of the pipeline.

    Returns:
        Samples and tokens per second are summed over the replicas, FLOP/s over all ranks. Times,
        norms and bytes are the largest of any rank; losses, utilisations and idle shares are means.
    """
    summed_by = {"samples_per_s": len(rows) / pipelines, "tokens_per_s": len(rows) / pipelines}
    summed_by["flops_per_s"] = 1.0
    combined = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name in summed_by:
            combined[name] = sum(values) / summed_by[name]
        elif name in ("loss", "mfu", "idle") or name.startswith("lr"):
            combined[name] = statistics.fmean(values)
        else:
            combined[name] = max(values)
    return combined
