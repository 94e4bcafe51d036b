"""Automatic cuts against cuts by hand, on two real ranks, and the plan against what it measures."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autosplit.errors import PipelineError
from autosplit.pipeline.action import ActionKind
from autosplit.pipeline.launch import launch
from autosplit.pipeline.simulate import simulate
from autosplit.pipeline.timeline import Span, median_durations
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.planner.costs import ModelCosts, average
from autosplit.planner.device import measure_device
from autosplit.planner.estimate import estimate
from autosplit.planner.form import Form
from autosplit.planner.links import measure_link
from autosplit.planner.profile import profile
from autosplit.planner.solve import solve
from autosplit.planner.specimen import Conditions, distinct
from autosplit.planner.stages import Partition, cut
from autosplit.planner.whole import WholeModel

from .models import CASES, Subject

STAGES = 2
MICROBATCHES = 4
SCHEDULE = "1f1b"

_WARMUP = 2
_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True)
class Amount:
    """How much to measure."""

    steps: int = 10
    seconds: float = 12.0  # of profiling
    tiny: bool = False


def measure(amount: Amount, names: Sequence[str] = tuple(CASES)) -> Iterator[dict[str, Any]]:
    """One row for each model, as soon as it is measured."""
    for name in names:
        yield launch(_compare, STAGES, (name, amount), timeout=_TIMEOUT, threads=1)[0]


def _compare(case: str, amount: Amount) -> dict[str, Any]:
    """What every rank does; the row is the same on all."""
    subject = CASES[case].subject(tiny=amount.tiny)
    model = subject.build()
    names = subject.cut_by_hand(STAGES)
    whole = WholeModel.capture(model, subject.example()).divided(names)
    _, targets = subject.batch_fn(0, subject.microbatch_size)
    conditions = Conditions(loss_fn=subject.loss_fn, targets=targets)
    start = time.perf_counter()
    costs = average(_gather(profile(whole, conditions, seconds=amount.seconds)))
    profiling = time.perf_counter() - start
    links = measure_link()
    found = solve(costs, STAGES, MICROBATCHES, SCHEDULE, links=links)
    # A solver's cuts lie behind a block, a partition's before one.
    chosen = [index + 1 for index in found.cuts]
    by_hand = [whole.start(name) for name in names]
    guess = estimate(whole, conditions, device=_gather(measure_device())[0])
    guessed = [index + 1 for index in solve(guess, STAGES, MICROBATCHES, SCHEDULE).cuts]
    ways = {"automatic": chosen} | ({} if by_hand == chosen else {"by hand": by_hand})
    runs = {way: _Run(subject, whole, cuts, costs, links) for way, cuts in ways.items()}
    for step in range(_WARMUP + amount.steps):
        for run in runs.values():
            run.step(step, counted=step >= _WARMUP)
    rows = {way: run.row() for way, run in runs.items()}
    return {
        "name": case,
        "blocks": len(whole.blocks),
        "kinds": len(distinct(whole, conditions)),
        "profiling": profiling,
        "even": _most_even(costs),
        "estimated": [whole.blocks[index].name for index in guessed],
        "latency": links.latency,
        "bandwidth": links.bandwidth,
        **rows,
    }


class _Run:
    """A trainer over one way to cut, and what was measured of it."""

    def __init__(
        self,
        subject: Subject,
        whole: WholeModel,
        cuts: list[int],
        costs: ModelCosts,
        links: Any,
    ) -> None:
        self._subject = subject
        self._partition: Partition = cut(whole, cuts)
        ends = [0, *cuts, len(whole.blocks)]
        stages = [costs.stage(first, last) for first, last in itertools.pairwise(ends)]
        self._predicted = [stage.times for stage in stages]
        schedule = Form(SCHEDULE).build(STAGES, MICROBATCHES, self._predicted)
        message = {index: costs.crossing[end - 1] for index, end in enumerate(cuts)}
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
        durations = {
            (stage, kind): seconds
            for stage, times in enumerate(self._predicted)
            for kind, seconds in zip(kinds, times, strict=True)
        }
        transfer = dataclasses.replace(links, message_bytes=message)
        self._step = simulate(schedule, durations, transfer=transfer).makespan
        self._trainer = PipelineTrainer(
            self._partition,
            subject.loss_fn,
            lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            microbatches=MICROBATCHES,
            schedule=schedule,
            record=True,
        )
        self._seconds: list[float] = []
        self._spans: list[Span] = []

    def step(self, step: int, *, counted: bool) -> None:
        """One step with its gradients, without the optimizer's update."""
        batch = self._subject.batch_fn(step, MICROBATCHES * self._subject.microbatch_size)
        dist.barrier()
        start = time.perf_counter()
        losses = self._trainer.forward_backward(batch)
        seconds = time.perf_counter() - start
        _clear(self._trainer.modules.values())
        if not torch.isfinite(losses).all():
            raise PipelineError(f"a loss of {losses.tolist()}")
        if counted:
            self._seconds.append(seconds)
            self._spans += self._trainer.timeline().spans

    def row(self) -> dict[str, Any]:
        found = median_durations(self._spans)
        self._trainer.close()
        return {
            "cuts": list(self._partition.names),
            "seconds": self._seconds,
            "predicted": self._step,
            "predicted_times": self._predicted,
            "times": [
                [found.get((stage, ActionKind(kind)), 0.0) for kind in "FIW"]
                for stage in range(STAGES)
            ],
        }


def _clear(modules: Any) -> None:
    for module in modules:
        module.zero_grad(set_to_none=True)


def _most_even(costs: ModelCosts) -> float:
    """The least that the slowest of two stages takes over the mean of both."""
    count = len(costs.blocks)
    found = []
    for index in range(1, count):
        pair = [sum(costs.stage(*ends).times) for ends in ((0, index), (index, count))]
        found.append(max(pair) / statistics.fmean(pair))
    return min(found)


def _gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
