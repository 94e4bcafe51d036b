"""How much of the reduction of replicas W hides: stages that sleep, over links that take time."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autosplit.mesh.costs import Link
from autosplit.pipeline import PipelineTrainer, RunOptions, StageOptions
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.simulation.reductions import Reductions, last_weights_by_stage
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.training import replicas as model_replicas

from ..results import Rows, table
from .throttled_link import Throttled

_MESSAGE = torch.Size([64])
_PARTS = 8  # parameters of a stage, a slice of W each
_ELEMENTS = 2**14  # of each
TARGET, STEP = 0.8, 1.03


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule of stages that take equal times.

    Attributes:
        schedule: its name.
        stages: how many there are, of two ranks a pipeline.
        slices: of W.
        seconds: of F, of I and of W of a stage.
        reduction: of all of a rank's gradients, in multiples of the Ws of a microbatch there.
    """

    schedule: str
    stages: int
    slices: int
    seconds: float
    reduction: float
    microbatches: int = 4

    @property
    def name(self) -> str:
        sliced = f"{self.slices} slices" if self.slices > 1 else "whole"
        return f"{self.schedule}, W {sliced}, reduction {self.reduction:g} W"

    @property
    def link(self) -> Link:
        """That of a rank to its replica."""
        seconds = self.reduction * self.seconds * (self.stages / 2)
        return Link(0.0, self.bytes * (self.stages / 2) / seconds)

    @property
    def bytes(self) -> int:
        """Of a stage's gradients."""
        return 4 * _PARTS * _ELEMENTS


CASES = [
    Case(schedule, stages, slices, seconds, reduction)
    for schedule, stages, seconds in (
        ("1f1b", 2, 0.12),
        ("gpipe", 2, 0.12),
        ("interleaved", 4, 0.06),
        ("zb-v", 4, 0.06),
    )
    for slices in (1, _PARTS)
    for reduction in (0.5, 1.0)
]


class Sleeper(nn.Module):
    """Parameters, and nothing else."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(_ELEMENTS) for _ in range(_PARTS))


class SleepingStage:
    """A stage that takes its time, with gradients of ones."""

    def __init__(self, module: nn.Module, args: list[Tensor], *, index: int, case: Case) -> None:
        self.module = module
        self._case = case
        self._inputs = len(args)
        self._last = index == case.stages - 1
        self.output_specs = [(torch.Size([]) if self._last else _MESSAGE, torch.float32, True)]
        self._names = [name for name, _ in module.named_parameters()]
        self._pending: set[str] = set()

    @property
    def slices(self) -> list[list[str]]:
        each = len(self._names) // self._case.slices
        return [self._names[at : at + each] for at in range(0, len(self._names), each)]

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        inputs.clear()
        time.sleep(self._case.seconds)
        return [torch.zeros(self.output_specs[0][0])]

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        output_grads.clear()
        time.sleep(self._case.seconds)
        return [torch.zeros(_MESSAGE), *[None] * (self._inputs - 1)]

    def backward_weight(self, microbatch: int, slice: int | None = None) -> None:
        parts = self.slices if slice is None else [self.slices[slice]]
        time.sleep(self._case.seconds * len(parts) / len(self.slices))
        self._pending.update(name for names in parts for name in names)

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        found = self.backward_input(microbatch, output_grads)
        self.backward_weight(microbatch)
        return found

    def publish(self, names: Collection[str] | None = None) -> None:
        for name, parameter in self.module.named_parameters():
            if name in self._pending and (names is None or name in names):
                self._pending.discard(name)
                parameter.grad = torch.ones_like(parameter)


def measure(steps: int, only: str = "") -> Iterator[dict[str, Any]]:
    """A row for each case whose name has ``only`` in it, on two pipelines of two ranks."""
    mine = [case for case in CASES if only in case.name]
    for case, found in zip(mine, launch(on_rank, 4, (mine, steps), timeout=900)[0], strict=True):
        yield {"name": case.name, **dataclasses.asdict(case), **found}


def on_rank(mine: list[Case], steps: int) -> Rows:
    return [_run(case, steps) for case in mine]


def _run(case: Case, steps: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))

    def stage(module: nn.Module, args: list[Tensor], *, index: int) -> SleepingStage:
        return SleepingStage(module, args, index=index, case=case)

    times = [(case.seconds,) * 3] * case.stages
    schedule = build(case.schedule, case.stages, case.microbatches, ranks=2, times=times)
    hidden, seconds = [], []
    batch = (torch.zeros(case.microbatches, 1), torch.zeros(case.microbatches, 1))
    with (
        Throttled(case.link),
        mock.patch.object(model_replicas, "CAP", 4 * _ELEMENTS),
        PipelineTrainer(
            Sleeper,
            nn.functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            stages=case.stages,
            microbatches=case.microbatches,
            schedule=schedule,
            mesh=mesh,
            stage_options=StageOptions(stage_factory=stage),
            run_options=RunOptions(record=True),
        ) as trainer,
    ):
        trainer.step(batch)
        for _ in range(steps):
            trainer.step(batch)
            timeline = trainer.timeline()
            hidden.append(timeline.reduction_hidden or 0.0)
            seconds.append(timeline.makespan)
    reductions = Reductions(
        [case.bytes] * case.stages, case.link, cap=4 * _ELEMENTS, slices=case.slices
    )
    size = [float(case.bytes)] * case.stages
    placed = dataclasses.replace(schedule, ranks=last_weights_by_stage(schedule.ranks, size))
    simulated = simulate(placed, _seconds(case), reductions=reductions)
    alone = simulate(placed, _seconds(case))
    return {
        "hidden": statistics.median(hidden),
        "hidden_simulated": simulated.reduction_hidden,
        "measured": statistics.median(seconds),
        "simulated": simulated.makespan,
        "without": alone.makespan,
    }


def _seconds(case: Case) -> Callable[[Action], float]:
    return lambda action: case.seconds * (2 if action.kind is ActionKind.BACKWARD else 1)


def render(rows: Rows) -> str:
    headers = [
        *("schedule", "W", "reduction / W", "hidden", "simulated", "step ms", "simulated ms"),
        *("ratio", "without reduction ms"),
    ]
    cells = [
        [
            row["schedule"],
            "whole" if row["slices"] == 1 else f"{row['slices']} slices",
            f"{row['reduction']:g}",
            f"{row['hidden']:.0%}" if row["hidden"] >= TARGET else f"**{row['hidden']:.0%}**",
            f"{row['hidden_simulated']:.0%}",
            f"{1e3 * row['measured']:.0f}",
            f"{1e3 * row['simulated']:.0f}",
            _judged(row["measured"] / row["simulated"]),
            f"{1e3 * row['without']:.0f}",
        ]
        for row in rows
    ]
    return table(headers, cells)


def _judged(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio <= STEP else f"**{ratio:.3f}**"
