"""W of several microbatches: gradients added one by one, or by the product that makes them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autosplit
from autosplit.pipeline import PipelineTrainer, RunOptions, StageOptions, launch
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.planner import Plan
from autosplit.torch_internals.state import distinct_storage_bytes
from examples.families import FAMILIES

from ..peak import peak_bytes
from ..results import Rows, table
from .settings import Settings

RANKS = 2
COUNTS = (2, 4)
WAYS: Mapping[str, str] = {
    "one by one": "exact",
    "fused": "fused",
}
"""What the table calls it -> ``accumulation`` of the trainer."""

_WARMUP = 2


@dataclasses.dataclass
class Found:
    """What one rank measured of one trainer.

    Attributes:
        steps: seconds of each step.
        weights: seconds that W took in each.
        peak: the most bytes of tensors that this rank holds in a step.
        gap: distance of its gradients from those of one by one, over their norm.
    """

    steps: list[float] = dataclasses.field(default_factory=list)
    weights: list[float] = dataclasses.field(default_factory=list)
    peak: int = 0
    gap: float = 0.0


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family and number of microbatches; the trainers take turns in one run."""
    for family in settings.families:
        args = (family, settings.overrides(family), COUNTS, settings.steps)
        ranks = launch(alternating, RANKS, args, timeout=900.0, threads=1)
        for count, *found in zip(COUNTS, *ranks, strict=True):
            yield {"name": f"{family}, {count} microbatches", **_united(found)}


def _united(found: Sequence[Mapping[str, Found]]) -> dict[str, Any]:
    """What the ranks measured as that of a step, which is over when the later one is done."""
    every = {way: [rank[way] for rank in found] for way in WAYS}
    return {
        "steps": {
            way: [*map(max, zip(*(each.steps for each in ranks), strict=True))]
            for way, ranks in every.items()
        },
        "weights": {
            way: [*map(sum, zip(*(each.weights for each in ranks), strict=True))]
            for way, ranks in every.items()
        },
        "peak": {way: max(each.peak for each in ranks) for way, ranks in every.items()},
        "gap": {way: max(each.gap for each in ranks) for way, ranks in every.items()},
    }


def alternating(
    family: str, overrides: Mapping[str, object], counts: Sequence[int], steps: int
) -> list[dict[str, Found]]:
    """On each rank, for each number of microbatches: all trainers step by step, under GPipe with
    every W at the end.
    """
    subject = FAMILIES[family](**overrides)
    return [_alternating(subject, count, steps) for count in counts]


def _alternating(subject: Any, microbatches: int, steps: int) -> dict[str, Found]:
    size = microbatches * subject.microbatch_size
    found = {way: Found() for way in WAYS}
    torch.manual_seed(0)
    plan = autosplit.partition(
        subject.build(),
        subject.example(),
        stages=RANKS,
        microbatches=microbatches,
        schedule="gpipe",
        weights="2bp",
        costs="estimate",
    )
    with contextlib.ExitStack() as stack:
        trainers = {
            way: stack.enter_context(_trainer(subject, plan, way, microbatches)) for way in WAYS
        }
        _compare(trainers, found, subject.batch_fn(0, size))
        for step in range(_WARMUP + steps):
            for way, trainer in trainers.items():
                dist.barrier()
                start = time.perf_counter()
                trainer.step(subject.batch_fn(step, size))
                if step >= _WARMUP:
                    found[way].steps.append(time.perf_counter() - start)
                    found[way].weights.append(sum(_weights(trainer)))
        for way, trainer in trainers.items():
            batch = subject.batch_fn(0, size)
            resident = distinct_storage_bytes(_resident(trainer))
            found[way].peak = resident + peak_bytes(
                lambda: trainer.step(batch),  # noqa: B023
                trainer.device,
            )
    return found


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A model that is cut, with parameters of its own."""

    plan: Plan

    @property
    def wiring(self) -> Any:
        return self.plan.wiring

    @property
    def shared(self) -> Any:
        return self.plan.shared

    @property
    def stages(self) -> int:
        return self.plan.stages

    def build(self, index: int) -> torch.nn.Module:
        return copy.deepcopy(self.plan.build(index))


def _trainer(subject: Any, plan: Plan, way: str, microbatches: int) -> PipelineTrainer:
    return PipelineTrainer(
        _Copy(plan),
        subject.loss_fn,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        microbatches=microbatches,
        schedule="gpipe",
        stage_options=StageOptions(accumulation=WAYS[way]),
        run_options=RunOptions(weights="2bp", timeout=120.0, record=True),
    )


def _compare(
    trainers: Mapping[str, PipelineTrainer], found: Mapping[str, Found], batch: Any
) -> None:
    """Gradients of the same step."""
    baseline: dict[tuple[int, str], Tensor] = {}
    for way, trainer in trainers.items():
        trainer.forward_backward(batch)
        grads = {(s, n): g for s, own in trainer.gradients().items() for n, g in own.items()}
        baseline = baseline or {key: grad.clone() for key, grad in grads.items()}
        norm = sum(float(grad.norm()) ** 2 for grad in baseline.values()) ** 0.5
        gaps = [float((grads[key] - grad).norm()) for key, grad in baseline.items()]
        found[way].gap = max(gaps) / norm
        for module in trainer.modules.values():
            module.zero_grad(set_to_none=True)


def _weights(trainer: PipelineTrainer) -> Iterator[float]:
    """Seconds of each call of W of this rank's last step."""
    for span in trainer.timeline().spans:
        if span.rank == trainer.rank and span.action.kind is ActionKind.BACKWARD_WEIGHT:
            yield span.end - span.start


def _resident(trainer: PipelineTrainer) -> list[Tensor]:
    held = [t for m in trainer.modules.values() for t in (*m.parameters(), *m.buffers())]
    states = [] if trainer.optimizer is None else trainer.optimizer.state.values()
    return held + [t for s in states for t in s.values() if isinstance(t, Tensor)]


def render(rows: Rows) -> str:
    """Time of W and of the step over those of one by one, memory, and what rounds differently."""
    first, *others = WAYS
    return "\n\n".join(
        [
            table(
                ["W of a step", f"{first} ms", *(f"{way} / {first}" for way in others)],
                [_times(row, "weights") for row in rows],
            ),
            table(
                ["step", f"{first} ms", *(f"{way} / {first}" for way in others)],
                [_times(row, "steps") for row in rows],
            ),
            table(
                ["peak MiB", *WAYS],
                [
                    [row["name"], *(f"{row['peak'][way] / 2**20:.1f}" for way in WAYS)]
                    for row in rows
                ],
            ),
            table(
                ["", "distance of gradients"],
                [[row["name"], f"{row['gap'][others[-1]]:.0e}"] for row in rows],
            ),
        ]
    )


def _times(row: Mapping[str, Any], what: str) -> list[str]:
    baseline, *others = (row[what][way] for way in WAYS)
    ratios = [
        statistics.median(mine / base for mine, base in zip(each, baseline, strict=True))
        for each in others
    ]
    return [
        row["name"],
        f"{1e3 * statistics.median(baseline):.1f}",
        *(f"{ratio:.3f}" for ratio in ratios),
    ]
