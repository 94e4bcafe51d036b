"""Compare fused and split backwards on ranks that alternate step by step.

Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.compare.tables import Row
from autosplit.pipeline.builders.build import AUTO, SCHEDULES
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.simulation.simulate import Timeline, median_durations, simulate
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts, profile
from autosplit.planner.cutting import device_of_trainer, on_all_ranks
from autosplit.ranks.default_group import gather, process_group
from autosplit.ranks.launch import launch
from autosplit.runtime.options import SplitOptions
from autosplit.text.figures import spread
from autosplit.text.progress import working
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten
from autosplit.trainer.options import RunOptions
from autosplit.trainer.plan import partition
from autosplit.trainer.trainer import PipelineTrainer
from autosplit.trainer.tuning import first_schedule

from .example import TrainedExample, resized, samples_of, tokens_of, trained_example

Gradients = Mapping[str, Tensor]

_WARM_UP = 2  # steps of each before the timed ones
_TIMEOUT, _WAITS = 120.0, 40  # seconds to wait for a rank, and so many single waits at most


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a comparison. Picklable, because every rank gets a copy.

    Attributes:
        factory: ``MODULE:FACTORY`` that returns a model and the inputs of a microbatch.
        overrides: keyword arguments for the factory.
        stages: number of pipeline stages.
        ranks: number of processes; with fewer than stages, a process runs several stages.
        cases: schedules and numbers of microbatches, in the order in which they are compared.
        steps: number of timed steps of each of the two trainers, alternating.
        loss: ``MODULE:FUNCTION`` of ``loss(output, targets)``; None: the model's own, see
            ``own_loss``.
        backend: runs the stages' graphs, see ``autosplit.split``.
        profiling: seconds to measure the costs of blocks, by which the model is cut.
    """

    factory: str
    overrides: Mapping[str, object]
    stages: int
    ranks: int
    cases: Sequence[tuple[str, int]]
    steps: int = 20
    loss: str | None = None
    backend: str = "eager"
    profiling: float = 10.0


class ComparisonRow(NamedTuple):
    """A row of a comparison, with the timelines of a typical step (see ``typical_pair``).

    Attributes:
        row: the row.
        timeline: the step as measured.
        ideal: the same step simulated with the row's median durations. Transfers take no time, and
            actions wait for nothing but their inputs.
    """

    row: Row
    timeline: Timeline
    ideal: Timeline


def compare(settings: Settings) -> list[ComparisonRow] | None:
    """Run a comparison on ranks of this machine, or as one rank of a torchrun launch.

    Returns:
        The results; None on ranks other than 0 under torchrun.

    Raises:
        PipelineError: a rank failed; has that rank's error.
    """
    if "RANK" in os.environ:
        with process_group(_TIMEOUT):
            results = compare_on_rank(settings)
        return results if os.environ["RANK"] == "0" else None
    return launch(compare_on_rank, settings.ranks, (settings,), timeout=_TIMEOUT * _WAITS)[0]


def compare_on_rank(settings: Settings) -> list[ComparisonRow]:
    """Run the whole comparison; the result is the same on every rank."""
    example = trained_example(settings.factory, settings.overrides, settings.loss)
    whole = WholeModel.capture(copy.deepcopy(example.model), example.inputs)
    options = BlockOptions(SplitOptions(backend=settings.backend), device=device_of_trainer())
    costs = on_all_ranks(lambda: profile(whole, options, seconds=settings.profiling))
    results: list[ComparisonRow] = []
    for schedule, microbatches in settings.cases:
        results += _Case(settings, example, whole, costs, schedule, microbatches).run()
    return results


@dataclasses.dataclass
class _Run:
    """The fused or the split trainer of a case, and its measurements."""

    trainer: PipelineTrainer
    split: bool
    difference: float | None = 0.0
    peak: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    timelines: list[Timeline] = dataclasses.field(default_factory=list)

    def durations(self) -> dict[tuple[int, ActionKind], float]:
        """Median seconds by (stage, kind) over all timed steps."""
        return median_durations(timeline.spans for timeline in self.timelines)


@dataclasses.dataclass
class _Case:
    """The fused and the split trainer under one schedule and number of microbatches; both are cut
    from one capture.
    """

    settings: Settings
    example: TrainedExample
    whole: WholeModel
    costs: ModelCosts
    schedule: str
    microbatches: int

    def __post_init__(self) -> None:
        example = self.example
        self.samples = self.microbatches * samples_of(example.inputs)
        batch, target = resized((example.inputs, example.target), self.samples)
        self.batch, self.target = batch, target
        # Trainers take tensors; named inputs have other values, too, which are fixed when the model
        # is cut.
        if isinstance(batch, Mapping):
            batch = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        self.step_batch = batch, target

    def run(self) -> list[ComparisonRow]:
        """Compare the first gradients, measure memory, then time steps of the two trainers in
        turns.
        """
        # Before the trainers are built, so that an error of the model ends the comparison.
        expected = [self._whole(), self._whole()] if dist.get_rank() == 0 else []
        runs = [_Run(self._trainer(split), split) for split in (False, True)]
        try:
            self._check_gradients(runs, expected)
            expected.clear()
            for run in runs:
                self._settle(run)
                self._measure_memory(run)
            steps = _WARM_UP + self.settings.steps
            title = f"{self.schedule}, M={self.microbatches}, fused and split"
            with working(title, total=steps, unit="step") as progress:
                for step in range(steps):
                    for run in runs:
                        self._time_step(run, timed=step >= _WARM_UP)
                    progress.advance()
        finally:
            for run in runs:
                run.trainer.close()
        makespans = [[timeline.makespan for timeline in run.timelines] for run in runs]
        pair = typical_pair([run.seconds for run in runs], makespans)
        return [self._summarise(run, runs[0], pair) for run in runs]

    def _trainer(self, split: bool) -> PipelineTrainer:
        settings, schedule = self.settings, self._schedule(split)
        plan = partition(
            self.whole.bound_to(copy.deepcopy(self.whole.model)),
            stages=settings.stages,
            microbatches=self.microbatches,
            schedule=self._schedule_of_cuts(schedule),
            ranks=settings.ranks,
            split_backward=split,
            backend=settings.backend,
            costs=self.costs,
        )
        changed = {"schedule": AUTO} if schedule == AUTO else {}
        return plan.trainer(
            self.example.loss,
            lambda parameters: torch.optim.AdamW(parameters),
            run_options=RunOptions(timeout=_TIMEOUT, record=True),
            **changed,
        )

    def _schedule_of_cuts(self, schedule: str) -> str | Schedule:
        """The schedule for which the model is cut. For "auto", it is the schedule of the first
        steps, which "auto" measures.
        """
        if schedule != AUTO:
            return schedule
        return first_schedule(self.settings.stages, self.microbatches, self.settings.ranks)

    def _schedule(self, split: bool) -> str:
        """The schedule of the split or the fused trainer. For schedules that only exist split, and
        for "auto", the fused trainer runs 1F1B.
        """
        can_fuse = self.schedule != AUTO and SCHEDULES[self.schedule].fused
        return self.schedule if split or can_fuse else "1f1b"

    def _check_gradients(self, runs: list[_Run], expected: list[Gradients]) -> None:
        """Compare both trainers' gradients of the first step with plain autograd's.

        Args:
            runs: the fused and the split trainer.
            expected: gradients of two plain backwards, whose difference is that of plain autograd;
                empty except on rank 0.
        """
        for run in runs:
            run.trainer.forward_backward(self.step_batch)
            local = [_gradients(module) for module in run.trainer.modules.values()]
            stages = [gradients for part in gather(local) for gradients in part]
            present = {name: grad for gradients in stages for name, grad in gradients.items()}
            if expected:
                run.difference = largest_difference(present, expected[0])
                if 0.0 < run.difference < math.inf and largest_difference(*expected):
                    run.difference = None
            for module in run.trainer.modules.values():
                module.zero_grad(set_to_none=True)

    def _whole(self) -> Gradients:
        """Gradients of the mean loss over the microbatches, for the whole model in this process."""
        device = device_of_trainer() or torch.device("cpu")
        model, count = copy.deepcopy(self.example.model).to(device), self.microbatches
        leaves, spec = tree_flatten((self.batch, self.target))
        cut = [
            leaf.to(device).chunk(count) if isinstance(leaf, Tensor) else [leaf] * count
            for leaf in leaves
        ]
        for parts in zip(*cut, strict=True):
            inputs, target = tree_unflatten([*parts], spec)
            args = inputs if isinstance(inputs, tuple) else (inputs,)
            output = model(**inputs) if isinstance(inputs, Mapping) else model(*args)
            (self.example.loss(output, target) / count).backward()
        return _gradients(model)

    def _settle(self, run: _Run) -> None:
        """Run the steps that ``"auto"`` measures; its schedule is final afterwards."""
        while not run.trainer.settled:
            run.trainer.step(self.step_batch)

    def _measure_memory(self, run: _Run) -> None:
        """Run steps that are not timed, and measure their memory. They also create the optimizer's
        state.
        """
        trainer = run.trainer
        trainer.step(self.step_batch)
        trainer.record = "memory"
        trainer.step(self.step_batch)
        memory, at = trainer.memory(), trainer.rank
        trainer.record = True
        run.peak = gather(memory.fixed[at] + memory.peak_activations[at])

    def _time_step(self, run: _Run, *, timed: bool) -> None:
        dist.barrier()
        start = time.perf_counter()
        run.trainer.step(self.step_batch)
        seconds = time.perf_counter() - start
        if timed:
            run.seconds.append(seconds)
            run.timelines.append(run.trainer.timeline())

    def _summarise(self, run: _Run, fused: _Run, pair: int) -> ComparisonRow:
        durations = run.durations()
        ideal = simulate(run.trainer.schedule, durations)
        ideal_fused = simulate(fused.trainer.schedule, fused.durations())
        row = Row(
            schedule=self._schedule(run.split),
            split=run.split,
            stages=self.settings.stages,
            microbatches=self.microbatches,
            samples=self.samples,
            tokens=tokens_of(self.batch),
            median_s=statistics.median(run.seconds),
            spread_s=spread(run.seconds),
            speedup=_speedup(fused.seconds, run.seconds),
            ideal_speedup=ideal_fused.makespan / ideal.makespan,
            bubble=statistics.median(timeline.bubble_ratio() for timeline in run.timelines),
            ideal_bubble=ideal.bubble_ratio(),
            peak_bytes=run.peak,
            max_grad_diff=run.difference,
            durations_s=_by_kind(durations, self.settings.stages),
            drawn_step=pair + 1,
        )
        return ComparisonRow(row, run.timelines[pair], ideal)


def _speedup(fused: Sequence[float], split: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(fused, split, strict=True))


def typical_pair(seconds: Sequence[Sequence[float]], makespans: Sequence[Sequence[float]]) -> int:
    """Return the index of the pair of steps, (fused, split), that the picture shows.

    It is the pair nearest to three medians: the time of the split step, the speed-up of the whole
    step, and the speed-up of forward and backward, which the picture draws.

    Args:
        seconds: two lists of times of whole steps: fused, and split.
        makespans: two lists of times of forward and backward only.
    """
    (fused, split), median = seconds, statistics.median(seconds[1])
    speedup = _speedup(fused, split)

    def distance(pair: int) -> float:
        ratios = [one[pair] / other[pair] / speedup for one, other in (seconds, makespans)]
        return sum(abs(math.log(ratio)) for ratio in (split[pair] / median, *ratios))

    return min(range(len(split)), key=distance)


def _gradients(module: nn.Module) -> Gradients:
    named = module.named_parameters()
    return {name: parameter.grad.cpu() for name, parameter in named if parameter.grad is not None}


def largest_difference(gradients: Gradients, expected: Gradients) -> float:
    """The largest absolute difference of the stages' gradients from the whole model's; infinite if
    a gradient is missing. Every stage with a tied parameter has the parameter's whole gradient.
    """
    if not gradients.keys() >= expected.keys():
        return math.inf
    differences = [(gradients[name] - grad).abs().max().item() for name, grad in expected.items()]
    return max(differences, default=0.0)


def _by_kind(durations: dict[tuple[int, ActionKind], float], stages: int) -> dict[str, list[float]]:
    kinds = sorted({kind.value for _, kind in durations}, key="FIWB".index)
    return {kind: [durations[stage, ActionKind(kind)] for stage in range(stages)] for kind in kinds}
