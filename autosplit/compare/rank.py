"""What each rank of a comparison does. Every rank makes the same calls in the same order."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from autosplit.dump.dump import dump
from autosplit.mesh.dimensions import REPLICATE
from autosplit.mesh.group_device import device_of_group
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.engine.execution.stage_assembly import footprint
from autosplit.pipeline.engine.messages.default_group import gather
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Timeline, median_durations
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.stage import Stage
from autosplit.text.quartiles import spread

from .cutting import measured_costs, stages_for
from .peak_memory import peak_bytes
from .reference import Gradients, largest_difference, on_cpu, single_process_gradients, united
from .settings import Comparison, Row, Settings
from .workload import Workload, load_workload

_Summary = tuple[Row, Timeline, Timeline, list[StageMemory]]
"""A row, the step nearest to its median, the ideal one, and what each stage keeps."""


@dataclasses.dataclass
class _Run:
    """One of the two trainers and what was measured of it."""

    trainer: PipelineTrainer
    split: bool
    difference: float = 0.0
    peak: list[int] = dataclasses.field(default_factory=list)
    kept: list[StageMemory] = dataclasses.field(default_factory=list)
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
    rows: list[Row] = []
    timelines: list[Timeline] = []
    ideals: list[Timeline] = []
    memory: list[list[StageMemory]] = []
    total = len(cases) * 2 * (settings.warmup + settings.steps + 2)
    # None: shown on a terminal, not in a log file.
    with tqdm(total=total, unit="step", disable=True if _rank() > 0 else None) as bar:
        for schedule, microbatches in cases:
            bar.set_description(f"{schedule} M={microbatches}")
            case = _Case(settings, workload, costs, schedule, microbatches, bar.update)
            for row, timeline, ideal, kept in case.run():
                rows.append(row)
                timelines.append(timeline)
                ideals.append(ideal)
                memory.append(kept)
    return Comparison(rows, timelines, ideals, memory)


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
            split_backward=split,
            weights=settings.weights if split else None,
            backend=settings.backend,
            timeout=settings.timeout,
            record=True,
            mesh=self._mesh(),
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
        """What this rank's replica takes of a batch."""
        mesh, replicas = run.trainer.mesh, self.settings.replicas
        if mesh is None or replicas == 1:
            return batch
        inputs, targets = (part.chunk(replicas) for part in batch)
        own = mesh.get_local_rank(REPLICATE)
        return inputs[own], targets[own]

    def _check_gradients(self, runs: list[_Run]) -> None:
        """Compare both trainers' gradients of step 0 with plain autograd's, on rank 0."""
        batch = self._batch(0)
        reference = None
        if _rank() == 0:
            whole = self.workload.model_fn is not None
            stages = 1 if whole else self.settings.stages
            device = runs[0].trainer.device
            reference = single_process_gradients(
                self.workload, stages, self.microbatches * self.settings.replicas, batch, device
            )
        for run in runs:
            run.trainer.forward_backward(self._share(run, batch))
            gathered = _gather(on_cpu(run.trainer.gradients()))
            if reference is not None:
                mine: Gradients = {stage: g for part in gathered for stage, g in part.items()}
                mine = united(mine, reference[0]) if len(reference) == 1 else mine
                run.difference = largest_difference(mine, reference)
            for module in run.trainer.modules.values():
                module.zero_grad(set_to_none=True)
            self.advance()

    def _measure_memory(self, run: _Run) -> None:
        """A step that is not timed; the optimizer's state exists from here on."""
        trainer, batch = run.trainer, self._share(run, self._batch(0))
        trainer.step(batch)
        resident = [t for m in trainer.modules.values() for t in (*m.parameters(), *m.buffers())]
        if trainer.optimizer is not None:
            states = trainer.optimizer.state.values()
            resident += [t for s in states for t in s.values() if isinstance(t, torch.Tensor)]
        own = {index: footprint(stage) for index, stage in trainer.stages.items()}
        every = {index: size for part in _gather(own) for index, size in part.items()}
        run.kept = [StageMemory(*every[index]) for index in range(self.settings.stages)]
        run.peak = _gather(peak_bytes(lambda: trainer.step(batch), resident, trainer.device))
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
        return row, run.timelines[nearest], ideal, run.kept


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
