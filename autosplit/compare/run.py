"""A comparison: its ranks started, and what each does. Every rank makes the same calls in the same
order.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from autosplit.dump.dump import dump
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.engine.default_group import gather, process_group
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Timeline, median_durations
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.pipeline.training.options import RunOptions, StageOptions
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockOptions, ModelCosts, profile
from autosplit.planner.cutting import device_of_trainer, on_all_ranks
from autosplit.runtime.split_options import SplitOptions
from autosplit.stage import Stage
from autosplit.text.figures import spread
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

from .example import own_loss, resized, samples_of, tokens_of, trained_example
from .settings import Comparison, Row, Settings

Gradients = Mapping[str, Tensor]


def single_process_gradients(module: nn.Module, microbatches: Sequence[Any]) -> Gradients:
    """Gradients of the mean loss over the microbatches' inputs, by name, on the CPU; of the whole
    model, which runs in this process.
    """
    for inputs in microbatches:
        loss = own_loss(_called(module, inputs), ())
        loss.backward(torch.full_like(loss, 1.0 / len(microbatches)))
    return _on_cpu(module)


def _called(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def chunks(inputs: Any, count: int, device: torch.device) -> list[Any]:
    """Those of a batch in ``count`` equal parts along dimension 0."""
    leaves, spec = tree_flatten(inputs)
    cut = [
        each.to(device=device).chunk(count) if isinstance(each, Tensor) else [each] * count
        for each in leaves
    ]
    return [tree_unflatten([each[at] for each in cut], spec) for at in range(count)]


def _on_cpu(module: nn.Module) -> Gradients:
    named = module.named_parameters()
    return {name: each.grad.cpu() for name, each in named if each.grad is not None}


def largest_difference(mine: Gradients, whole: Gradients) -> float:
    """The largest absolute difference of stages' gradients from those of the whole model; infinite
    where they lack one. Of a parameter that several stages hold each has the sum.
    """
    if not mine.keys() >= whole.keys():
        return float("inf")
    differences = [(mine[name] - grad).abs().max().item() for name, grad in whole.items()]
    return max(differences, default=0.0)


def measured_costs(model: nn.Module, inputs: Any, settings: Settings) -> ModelCosts:
    """What the blocks of the whole model cost, measured on all ranks at once."""
    whole = WholeModel.capture(copy.deepcopy(model), inputs)
    options = BlockOptions(
        split=SplitOptions(settings.backend),
        loss_fn=own_loss,
        targets=(),
        device=device_of_trainer(),
    )
    return on_all_ranks(
        lambda: profile(whole, options, seconds=settings.profiling), lambda costs: costs
    )


_Summary = tuple[Row, Timeline, Timeline]
"""A row, the step nearest to its median, and the ideal one."""


@dataclasses.dataclass
class _Run:
    """One of the two trainers and what was measured of it."""

    trainer: PipelineTrainer
    split: bool
    difference: float | None = 0.0
    peak: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    timelines: list[Timeline] = dataclasses.field(default_factory=list)

    def durations(self) -> dict[tuple[int, ActionKind], float]:
        """Median seconds by (stage, kind) over all timed steps."""
        return median_durations(timeline.spans for timeline in self.timelines)


# A comparison as a whole may take this many single waits.
_WAITS = 40


def compare(settings: Settings) -> Comparison | None:
    """Run a comparison on ranks of this machine, or as one rank of a torchrun launch.

    Returns:
        What was found; None on ranks other than 0 under torchrun.

    Raises:
        PipelineError: a rank failed; carries its error.
    """
    if "RANK" in os.environ:
        with process_group(settings.timeout):
            found = compare_on_rank(settings)
        return found if os.environ["RANK"] == "0" else None
    return launch(
        compare_on_rank,
        settings.ranks,
        (settings,),
        timeout=settings.timeout * _WAITS,
        threads=settings.threads,
    )[0]


def compare_on_rank(settings: Settings) -> Comparison:
    """Run the whole comparison; the result is the same on every rank."""
    model, inputs = trained_example(settings.factory, settings.overrides)
    costs = measured_costs(model, inputs, settings)
    cases = settings.cases
    found: list[_Summary] = []
    total = len(cases) * 2 * (settings.warmup + settings.steps + 2)
    # None: shown on a terminal, not in a log file.
    with tqdm(total=total, unit="step", disable=True if _rank() > 0 else None) as bar:
        for schedule, microbatches in cases:
            bar.set_description(f"{schedule} M={microbatches}")
            case = _Case(settings, model, inputs, costs, schedule, microbatches, bar.update)
            found += case.run()
    return Comparison(*map(list, zip(*found, strict=True)))


class _Case:
    """Fused and split under one schedule and number of microbatches."""

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        inputs: Any,
        costs: ModelCosts,
        schedule: str,
        microbatches: int,
        advance: Callable[[], Any],
    ) -> None:
        self.settings = settings
        self.model, self.inputs = model, inputs
        self.costs = costs
        self.schedule = schedule
        self.microbatches = microbatches
        self.samples = microbatches * samples_of(inputs)
        self.batch = resized(inputs, self.samples)
        self.advance = advance

    def run(self) -> list[_Summary]:
        runs = [_Run(self._trainer(split), split) for split in (False, True)]
        try:
            self._check_gradients(runs)
            for run in runs:
                self._measure_memory(run)
            for step in range(self.settings.warmup + self.settings.steps):
                for run in runs:
                    self._time_step(run, timed=step >= self.settings.warmup)
            self._dump_graphs(runs[1])
        finally:
            for run in runs:
                run.trainer.close()
        return [self._summarise(run, runs[0]) for run in runs]

    def _trainer(self, split: bool) -> PipelineTrainer:
        settings = self.settings
        return PipelineTrainer(
            copy.deepcopy(self.model),
            own_loss,
            lambda parameters: torch.optim.AdamW(parameters, lr=settings.learning_rate),
            example=self.inputs,
            stages=settings.stages,
            microbatches=self.microbatches,
            schedule=self._schedule(split),
            stage_options=StageOptions(backend=settings.backend, planning={"costs": self.costs}),
            run_options=RunOptions(
                split_backward=split,
                weights=settings.weights if split else None,
                timeout=settings.timeout,
                record=True,
            ),
        )

    def _schedule(self, split: bool) -> str:
        """Some schedules exist only split; what they are held against is 1F1B."""
        return self.schedule if split or SCHEDULES[self.schedule].fused else "1f1b"

    @property
    def _given(self) -> tuple[Any, Any]:
        """What trainers take of a batch: tensors; named inputs have other values, too, which are
        fixed when the model is cut.
        """
        inputs = self.batch
        if isinstance(inputs, Mapping):
            inputs = {k: v for k, v in inputs.items() if isinstance(v, Tensor)}
        return inputs, ()

    def _check_gradients(self, runs: list[_Run]) -> None:
        """Compare both trainers' gradients of step 0 with plain autograd's, on rank 0."""
        whole, again = None, functools.cache(lambda: self._whole(runs[0].trainer.device))
        for run in runs:
            run.trainer.forward_backward(self._given)
            gathered = _gather([*map(_on_cpu, run.trainer.modules.values())])
            if _rank() == 0:
                whole = whole or self._whole(run.trainer.device)
                mine = {name: g for part in gathered for own in part for name, g in own.items()}
                run.difference = largest_difference(mine, whole)
                if 0.0 < run.difference < math.inf and largest_difference(whole, again()):
                    run.difference = None
            for module in run.trainer.modules.values():
                module.zero_grad(set_to_none=True)
            self.advance()

    def _whole(self, device: torch.device) -> Gradients:
        parts = chunks(self.batch, self.microbatches, device)
        return single_process_gradients(copy.deepcopy(self.model).to(device), parts)

    def _measure_memory(self, run: _Run) -> None:
        """Steps that are not timed; the optimizer's state exists from here on."""
        trainer, batch = run.trainer, self._given
        trainer.step(batch)
        trainer.record = "memory"
        trainer.step(batch)
        memory = trainer.memory()
        trainer.record = True
        at = trainer.rank
        run.peak = _gather(memory.fixed[at] + memory.peak_activations[at])
        self.advance()

    def _time_step(self, run: _Run, *, timed: bool) -> None:
        batch = self._given
        _barrier()
        start = time.perf_counter()
        losses = run.trainer.step(batch)
        seconds = time.perf_counter() - start
        run.losses.append(losses.mean().item())
        if timed:
            run.seconds.append(seconds)
            run.timelines.append(run.trainer.timeline())
        self.advance()

    def _dump_graphs(self, run: _Run) -> None:
        if self.settings.dump is None:
            return
        for index, stage in run.trainer.stages.items():
            if isinstance(stage, Stage):
                folder = pathlib.Path(self.settings.dump) / f"stage{index}"
                dump(stage.functions, folder, f"stage {index} of {self.settings.factory}")

    def _summarise(self, run: _Run, fused: _Run) -> _Summary:
        durations = run.durations()
        ideal = simulate(run.trainer.schedule, durations)
        ideal_fused = simulate(fused.trainer.schedule, fused.durations())
        median = statistics.median(run.seconds)
        pairs = zip(fused.seconds, run.seconds, strict=True)
        row = Row(
            schedule=self._schedule(run.split),
            split=run.split,
            stages=self.settings.stages,
            microbatches=self.microbatches,
            median_s=median,
            spread_s=spread(run.seconds),
            tokens_per_s=self.samples * tokens_of(self.inputs) / median,
            speedup=statistics.median(a / b for a, b in pairs),
            ideal_speedup=ideal_fused.makespan / ideal.makespan,
            bubble=statistics.median(each.bubble_ratio() for each in run.timelines),
            ideal_bubble=ideal.bubble_ratio(),
            peak_bytes=run.peak,
            max_grad_diff=run.difference,
            first_loss=run.losses[0],
            last_loss=run.losses[-1],
            durations_s=_by_kind(durations, self.settings.stages),
        )
        nearest = min(range(len(run.seconds)), key=lambda i: abs(run.seconds[i] - median))
        return row, run.timelines[nearest], ideal


def _by_kind(durations: dict[tuple[int, ActionKind], float], stages: int) -> dict[str, list[float]]:
    kinds = sorted({kind.value for _, kind in durations}, key="FIWB".index)
    return {kind: [durations[stage, ActionKind(kind)] for stage in range(stages)] for kind in kinds}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gather(value: Any) -> list[Any]:
    """The value of every rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    return gather(value)
