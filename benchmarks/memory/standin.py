"""Stages that hold real tensors and take their time, so that many ranks run on any two cores."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.pipeline import PipelineTrainer, RunOptions, StageOptions
from autosplit.pipeline.ledger.prediction import stage_memory
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.ranks.launch import launch
from autosplit.stage import Stage

from ..pipeline.standin import Clock, makespans

ROWS, WIDTH, LAYERS, NARROW = 2048, 32, 6, 4
"""Tensors of a quarter MiB, two of them kept for each layer, as much from F to I as from I to W; a
matrix product takes little of a core. What goes between stages is small beside that, as in a model.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule over stand-in stages, all alike.

    Attributes:
        name: of the way.
        schedule: what is run.
        times: seconds of F, I and W.
        folder: for what is offloaded; None where nothing is.
    """

    name: str
    schedule: Schedule
    times: tuple[float, float, float]
    folder: Path | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """Bytes by rank without the batch, and seconds of each timed step, from the first action to
    the last.
    """

    name: str
    peaks: tuple[int, ...]
    predicted: tuple[int, ...]
    seconds: list[float]
    losses: list[float]


class Keeping(nn.Module):
    """Products and activations of one width: what a layer saves, W needs."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        wide = [NARROW, *[WIDTH] * LAYERS]
        self.layers = nn.ModuleList(map(nn.Linear, wide, wide[1:]))
        self.last = nn.Linear(WIDTH, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        narrow: Tensor = self.last(x)
        return narrow


def _timed(kind: ActionKind, call: Callable[..., Any]) -> Callable[..., Any]:
    """As ``call``, but for the time."""

    @functools.wraps(call)
    def run(stage: Timed, *args: Any, **options: Any) -> Any:
        end = time.perf_counter() + stage.costs.seconds(Action(0, kind, 0))
        found = call(stage, *args, **options)
        stage.clock.sleep_until(end)
        return found

    return run


class Timed(Stage):
    """A stage whose calls take a given time, what they compute included."""

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Tensor],
        *,
        index: int,
        times: tuple[float, float, float],
        clock: Clock,
    ) -> None:
        super().__init__(module, args, index=index, defer_whole_backward=False)
        self.costs = Costs([times], [StageMemory(0.0, 0.0)])
        self.clock = clock

    forward = _timed(ActionKind.FORWARD, Stage.forward)
    recompute = _timed(ActionKind.FORWARD, Stage.recompute)
    backward_input = _timed(ActionKind.BACKWARD_INPUT, Stage.backward_input)
    backward_weight = _timed(ActionKind.BACKWARD_WEIGHT, Stage.backward_weight)
    backward = _timed(ActionKind.BACKWARD, Stage.backward)


def costs(
    stages: int, times: tuple[float, float, float], transfer: Transfer | None = None
) -> Costs:
    """Of the stages: what they keep is that of a stage that is traced here."""
    module, x = Keeping(0), torch.zeros(ROWS, NARROW, requires_grad=True)
    memory = stage_memory(Stage(module, [x]))
    return Costs([times] * stages, [memory] * stages, transfer or Transfer())


def measure(cases: Sequence[Case], steps: int) -> list[Found]:
    """Every case on as many processes as its schedule has ranks; all must have the same."""
    (ranks,) = {len(case.schedule.ranks) for case in cases}
    return launch(_on_rank, ranks, (list(cases), steps), timeout=1800.0)[0]


def _on_rank(cases: list[Case], steps: int) -> list[Found]:
    torch.set_num_threads(1)
    return [_run(case, steps) for case in cases]


def _run(case: Case, steps: int) -> Found:
    count = case.schedule.microbatches
    batch = torch.zeros(count * ROWS, NARROW), torch.zeros(count * ROWS, NARROW)
    with PipelineTrainer(
        Keeping,
        nn.functional.mse_loss,
        torch.optim.SGD,
        stages=case.schedule.stages,
        microbatches=count,
        schedule=case.schedule,
        stage_options=StageOptions(
            stage_factory=functools.partial(Timed, times=case.times, clock=Clock())
        ),
        run_options=RunOptions(timeout=120.0, record=True, store=case.folder),
    ) as trainer:
        losses = trainer.step(batch).tolist()
        seconds = makespans(trainer, batch, steps)
        trainer.record = "memory"
        trainer.step(batch)
        memory = trainer.memory()
    given = [bands[0].activations for bands in memory.bands]  # which the user holds anyway
    peaks = [peak - held for peak, held in zip(memory.peak_activations, given, strict=True)]
    predicted = [(peak or held) - held for peak, held in zip(memory.predicted, given, strict=True)]
    return Found(case.name, tuple(peaks), tuple(predicted), seconds, losses)


def slower(found: Found, plain: Found) -> float:
    """A step over one of the plain schedule."""
    return statistics.median(found.seconds) / statistics.median(plain.seconds)
