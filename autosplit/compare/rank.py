"""What each rank of a comparison does. Every rank makes the same calls in the same order."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from autosplit.dump.dump import dump
from autosplit.mesh.costs import device_of_group
from autosplit.mesh.dimensions import REPLICATE
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.engine.default_group import gather
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Timeline, median_durations
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.pipeline.training.options import RunOptions, StageOptions
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import ModelCosts
from autosplit.planner.cutting import device_of_trainer, profile_together
from autosplit.planner.profile import BlockOptions
from autosplit.runtime.split_options import SplitOptions
from autosplit.stage import Stage
from autosplit.text.figures import spread
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

from .example import load_workload
from .settings import Comparison, Row, Settings
from .workload import Workload

Gradients = Mapping[str, Tensor]


def single_process_gradients(
    workload: Workload, microbatches: int, batch: tuple[Any, Any], device: torch.device
) -> Gradients:
    """Gradients of the mean loss over the microbatches, by name, on the CPU; of the whole model,
    which runs in this process, on ``device``.
    """
    module = workload.stage_fn(0, 1).to(device)
    parts = (chunks(part, microbatches, device) for part in batch)
    for inputs, targets in zip(*parts, strict=True):
        loss = workload.loss_fn(_called(module, inputs), targets)
        loss.backward(torch.full_like(loss, 1.0 / microbatches))
    return _on_cpu(module)


def _called(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def chunks(part: Any, count: int, device: torch.device | None = None) -> list[Any]:
    """Inputs or targets of a batch in ``count`` equal parts along dimension 0."""
    leaves, spec = tree_flatten(part)
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


def measured_costs(workload: Workload, settings: Settings) -> ModelCosts | None:
    """What the blocks of the whole model cost, measured on all ranks at once; None where the
    workload has stages of its own.
    """
    if workload.model_fn is None:
        return None
    inputs, targets = workload.batch_fn(0, workload.microbatch_size)
    whole = WholeModel.capture(workload.model_fn(), inputs)
    options = BlockOptions(
        split=SplitOptions(settings.backend),
        loss_fn=workload.loss_fn,
        targets=targets,
        device=device_of_trainer(alone=False),
    )
    return profile_together(whole, options, settings.profiling, alone=False)


def stages_for(workload: Workload, settings: Settings, costs: ModelCosts | None) -> dict[str, Any]:
    """Arguments of a trainer: the stages, or the whole model that it cuts for what it runs."""
    if workload.model_fn is None:
        shared = workload.shared_parameters(settings.stages)
        return {
            "model": lambda index: workload.stage_fn(index, settings.stages),
            "stage_options": StageOptions(backend=settings.backend, shared_parameters=shared),
        }
    inputs, _ = workload.batch_fn(0, workload.microbatch_size)
    options = StageOptions(backend=settings.backend, planning={"costs": costs})
    return {"model": workload.model_fn(), "example": inputs, "stage_options": options}


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


def compare_on_rank(settings: Settings) -> Comparison:
    """Run the whole comparison; the result is the same on every rank."""
    workload = load_workload(settings.factory, settings.overrides)
    costs = measured_costs(workload, settings)
    cases = settings.cases
    found: list[_Summary] = []
    total = len(cases) * 2 * (settings.warmup + settings.steps + 2)
    # None: shown on a terminal, not in a log file.
    with tqdm(total=total, unit="step", disable=True if _rank() > 0 else None) as bar:
        for schedule, microbatches in cases:
            bar.set_description(f"{schedule} M={microbatches}")
            case = _Case(settings, workload, costs, schedule, microbatches, bar.update)
            found += case.run()
    return Comparison(*map(list, zip(*found, strict=True)))


class _Case:
    """Fused and split under one schedule and number of microbatches."""

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        costs: ModelCosts | None,
        schedule: str,
        microbatches: int,
        advance: Callable[[], Any],
    ) -> None:
        self.settings = settings
        self.workload = workload
        self.costs = costs
        self.schedule = schedule
        self.microbatches = microbatches
        self.advance = advance

    def run(self) -> list[_Summary]:
        runs = [_Run(self._trainer(split), split) for split in (False, True)]
        try:
            self._check_gradients(runs)
            for run in runs:
                self._measure_memory(run)
            for step in range(self.settings.warmup + self.settings.steps):
                for run in runs:
                    self._time_step(run, step)
            self._dump_graphs(runs[1])
        finally:
            for run in runs:
                run.trainer.close()
        return [self._summarise(run, runs[0]) for run in runs]

    def _trainer(self, split: bool) -> PipelineTrainer:
        settings = self.settings
        return PipelineTrainer(
            loss_fn=self.workload.loss_fn,
            optimizer_fn=lambda parameters: torch.optim.AdamW(
                parameters, lr=settings.learning_rate
            ),
            stages=settings.stages,
            microbatches=self.microbatches,
            schedule=self._schedule(split),
            mesh=self._mesh(),
            run_options=RunOptions(
                split_backward=split,
                weights=settings.weights if split else None,
                timeout=settings.timeout,
                record=True,
            ),
            **stages_for(self.workload, settings, self.costs),
        )

    def _mesh(self) -> DeviceMesh | None:
        mesh = self.settings.mesh
        if not mesh:
            return None
        names, sizes = zip(*mesh, strict=True)
        return init_device_mesh(device_of_group().type, sizes, mesh_dim_names=names)

    def _schedule(self, split: bool) -> str:
        """Some schedules exist only split; what they are held against is 1F1B."""
        return self.schedule if split or SCHEDULES[self.schedule].fused else "1f1b"

    def _batch(self, step: int) -> tuple[Any, Any]:
        """That of all replicas."""
        count = self.microbatches * self.settings.replicas
        return self.workload.batch_fn(step, count * self.workload.microbatch_size)

    def _share(self, run: _Run, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """What this rank's replica takes of a batch: tensors; named inputs have other values, too,
        which are fixed when the model is cut.
        """
        inputs, targets = batch
        if isinstance(inputs, Mapping):
            batch = {k: v for k, v in inputs.items() if isinstance(v, Tensor)}, targets
        mesh, replicas = run.trainer.mesh, self.settings.replicas
        if mesh is None or replicas == 1:
            return batch
        own = mesh.get_local_rank(REPLICATE)
        inputs, targets = (chunks(part, replicas)[own] for part in batch)
        return inputs, targets

    def _check_gradients(self, runs: list[_Run]) -> None:
        """Compare both trainers' gradients of step 0 with plain autograd's, on rank 0."""
        batch = self._batch(0)
        whole, again = None, functools.cache(lambda: self._whole(runs[0], batch))
        for run in runs:
            run.trainer.forward_backward(self._share(run, batch))
            gathered = _gather([*map(_on_cpu, run.trainer.modules.values())])
            if _rank() == 0:
                whole = whole or self._whole(runs[0], batch)
                mine = {name: g for part in gathered for own in part for name, g in own.items()}
                run.difference = largest_difference(mine, whole)
                if 0.0 < run.difference < math.inf and largest_difference(whole, again()):
                    run.difference = None
            for module in run.trainer.modules.values():
                module.zero_grad(set_to_none=True)
            self.advance()

    def _whole(self, run: _Run, batch: tuple[Any, Any]) -> Gradients:
        count = self.microbatches * self.settings.replicas
        return single_process_gradients(self.workload, count, batch, run.trainer.device)

    def _measure_memory(self, run: _Run) -> None:
        """Steps that are not timed; the optimizer's state exists from here on."""
        trainer, batch = run.trainer, self._share(run, self._batch(0))
        trainer.step(batch)
        trainer.record = "memory"
        trainer.step(batch)
        memory = trainer.memory()
        trainer.record = True
        at = trainer.rank
        run.peak = _gather(memory.fixed[at] + memory.peak_activations[at])
        self.advance()

    def _time_step(self, run: _Run, step: int) -> None:
        batch = self._share(run, self._batch(step))
        _barrier()
        start = time.perf_counter()
        losses = run.trainer.step(batch)
        seconds = time.perf_counter() - start
        run.losses.append(losses.mean().item())
        if step >= self.settings.warmup:
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
        samples = self.microbatches * self.settings.replicas * self.workload.microbatch_size
        hidden = [each.reduction_hidden for each in run.timelines]
        shares = [each for each in hidden if each is not None]
        row = Row(
            schedule=self._schedule(run.split),
            split=run.split,
            stages=self.settings.stages,
            microbatches=self.microbatches,
            median_s=median,
            spread_s=spread(run.seconds),
            tokens_per_s=samples * self.workload.tokens_per_sample / median,
            speedup=statistics.median(a / b for a, b in pairs),
            ideal_speedup=ideal_fused.makespan / ideal.makespan,
            bubble=statistics.median(each.bubble_ratio() for each in run.timelines),
            ideal_bubble=ideal.bubble_ratio(),
            peak_bytes=run.peak,
            max_grad_diff=run.difference,
            first_loss=run.losses[0],
            last_loss=run.losses[-1],
            durations_s=_by_kind(durations, self.settings.stages),
            reduction_hidden=statistics.median(shares) if shares else None,
        )
        nearest = min(range(len(run.seconds)), key=lambda i: abs(run.seconds[i] - median))
        return row, run.timelines[nearest], ideal


def _by_kind(durations: dict[tuple[int, ActionKind], float], stages: int) -> dict[str, list[float]]:
    order = ["F", "I", "W", "B", ActionKind.REDUCE_GRAD.value]
    kinds = sorted({kind.value for _, kind in durations}, key=order.index)
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
