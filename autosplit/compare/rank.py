"""What each rank of a comparison does. Every rank makes the same calls in the same order."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from autosplit.dump.dump import dump
from autosplit.mesh.costs import device_of_group
from autosplit.mesh.dimensions import REPLICATE
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.engine.default_group import gather
from autosplit.pipeline.engine.stages import footprint
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.simulation.activation_memory import StageMemory
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

from .settings import Comparison, Row, Settings
from .workload import Workload, load_workload

Gradients = dict[int, dict[str, Tensor]]


def single_process_gradients(
    workload: Workload,
    stages: int,
    microbatches: int,
    batch: tuple[Any, Any],
    device: torch.device,
) -> Gradients:
    """Gradients of the mean loss over the microbatches, by stage and parameter name, on the CPU.

    The stages run one after another in this process, on ``device``; gradients of shared parameters
    are summed over their holders.
    """
    modules = [workload.stage_fn(index, stages).to(device) for index in range(stages)]
    inputs, targets = (part.to(device).chunk(microbatches) for part in batch)
    for value, target in zip(inputs, targets, strict=True):
        for module in modules:
            value = module(*value) if isinstance(value, tuple) else module(value)
        loss = workload.loss_fn(value, target)
        loss.backward(torch.full_like(loss, 1.0 / microbatches))
    found = {
        index: {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        for index, module in enumerate(modules)
    }
    _sum_shared(found, workload.shared_parameters(stages))
    return on_cpu(found)


def on_cpu(gradients: Gradients) -> Gradients:
    """As they can be sent to another rank and compared there."""
    return {
        index: {name: grad.cpu() for name, grad in named.items()}
        for index, named in gradients.items()
    }


def united(mine: Gradients, names: Iterable[str]) -> Gradients:
    """Gradients of stages, whose parameters have the names of the whole model, as those of one.

    Of a parameter that several stages hold, under names that the whole model has for it, each has
    the sum; only ``names`` are kept.
    """
    every = {name: grad for grads in mine.values() for name, grad in grads.items()}
    wanted = set(names)
    return {0: {name: grad for name, grad in every.items() if name in wanted}}


def largest_difference(mine: Gradients, reference: Gradients) -> float:
    """The largest absolute difference; infinite where one side has a gradient the other lacks."""
    if {k: v.keys() for k, v in mine.items()} != {k: v.keys() for k, v in reference.items()}:
        return float("inf")
    differences = [
        (mine[index][name] - grad).abs().max().item()
        for index, grads in reference.items()
        for name, grad in grads.items()
    ]
    return max(differences, default=0.0)


def _sum_shared(found: Gradients, groups: Sequence[Sequence[tuple[int, str]]]) -> None:
    for group in groups:
        total = torch.stack([found[stage][name] for stage, name in group]).sum(0)
        for stage, name in group:
            found[stage][name] = total


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
        """Steps that are not timed; the optimizer's state exists from here on."""
        trainer, batch = run.trainer, self._share(run, self._batch(0))
        trainer.step(batch)
        trainer.record = "memory"
        trainer.step(batch)
        memory = trainer.memory()
        trainer.record = True
        own = {index: footprint(stage) for index, stage in trainer.stages.items()}
        every = {index: size for part in _gather(own) for index, size in part.items()}
        run.kept = [StageMemory(*every[index]) for index in range(self.settings.stages)]
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
