"""Every schedule over stages that sleep, so that 4 and 8 ranks run for real on any two cores."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import ScheduleError
from autosplit.pipeline import RunOptions, StageOptions
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.search.search import search
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.ranks.launch import launch
from autosplit.trainer.trainer import PipelineTrainer

from ..results import Rows, by_setting, mark, table

Times = tuple[float, float, float]

UNITS = {4: 0.24, 8: 0.12}  # ranks -> seconds of an F that is not cut further, at least
SHORTEST = 0.03  # seconds of an action: a message and two awakenings take a millisecond of it
RATIOS = ((1.0, 1.0, 1.0), (1.0, 1.0, 2 / 3))
TARGET = 1.05
BASELINE = "1f1b, fused"

_MESSAGE = torch.Size([1024])
_LEARNS = 0.1  # how much of a new lateness the guess takes up
_WORST = 0.0005  # seconds; a later end tells of another process, not of the timer


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule and the seconds of F, I and W of each of its stages."""

    name: str
    schedule: Schedule
    times: Times

    @property
    def unit(self) -> float:
        """Seconds of a rank's F, which its stages share."""
        return self.times[0] * self.schedule.stages / len(self.schedule.ranks)

    @property
    def costs(self) -> Costs:
        """Of all stages, each of which keeps one of anything."""
        stages = self.schedule.stages
        return Costs([self.times] * stages, [StageMemory(1.0, 1.0)] * stages)

    def seconds(self, action: Action) -> float:
        """The duration of an action."""
        return self.costs.seconds(action)


@dataclasses.dataclass(frozen=True)
class Found:
    """Seconds of one step, from the first action to the last; of ``step_async``, from one step
    to the next. ``unit`` is as of its case.
    """

    name: str
    ranks: int
    microbatches: int
    unit: float
    simulated: float
    measured: float
    simulated_async: float
    measured_async: float


class Sleeping:
    """A stage that takes its time and does nothing."""

    def __init__(
        self, module: nn.Module, args: list[Tensor], *, index: int, case: Case, clock: Clock
    ) -> None:
        self._seconds = case.seconds
        self._clock = clock
        self._index = index
        self._last = index == case.schedule.stages - 1
        self._inputs = len(args)
        self.output_specs = [(torch.Size([]) if self._last else _MESSAGE, torch.float32, True)]

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        end = self._end(ActionKind.FORWARD, microbatch)
        inputs.clear()
        outputs = [torch.zeros(self.output_specs[0][0])]
        self._clock.sleep_until(end)
        return outputs

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        return self._backward(ActionKind.BACKWARD_INPUT, microbatch, output_grads)

    def backward_weight(self, microbatch: int) -> None:
        self._clock.sleep_until(self._end(ActionKind.BACKWARD_WEIGHT, microbatch))

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        return self._backward(ActionKind.BACKWARD, microbatch, output_grads)

    def publish(self) -> None:
        pass

    def _backward(
        self, kind: ActionKind, microbatch: int, grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        end = self._end(kind, microbatch)
        grads.clear()
        gradients: list[Tensor | None] = [torch.zeros(_MESSAGE), *[None] * (self._inputs - 1)]
        self._clock.sleep_until(end)
        return gradients

    def _end(self, kind: ActionKind, microbatch: int) -> float:
        """When an action that begins now is over: what it makes is part of its time."""
        return time.perf_counter() + self._seconds(Action(self._index, kind, microbatch))


class Clock:
    """Sleeps for as long as it is told: less the time by which sleeps ended late so far."""

    def __init__(self) -> None:
        self._late = 0.0

    def sleep_until(self, end: float) -> None:
        """Come back at ``end``, never earlier."""
        wake = end - self._late
        time.sleep(max(wake - time.perf_counter(), 0.0))
        late = time.perf_counter() - wake
        self._late += _LEARNS * (min(late, _WORST) - self._late)
        while time.perf_counter() < end:  # what the guess was too large by
            pass


def measure_all(counts: Sequence[int]) -> Rows:
    """So many ranks, M = N, both ratios of F : I : W."""
    rows: Rows = []
    for ranks in counts:
        for ratio in RATIOS:
            label = f"N={ranks}, F:I:W = {':'.join(f'{3 * part:g}' for part in ratio)}"
            for found in measure(_cases(ranks, ratio), steps=2):
                row = dataclasses.asdict(found)
                rows.append({**row, "name": f"{label}: {found.name}", "schedule": found.name})
    return rows


def render(rows: Rows) -> str:
    """A table for each setting, speed-ups over the fused 1F1B in it."""
    return by_setting(rows, _setting)


def _setting(mine: Rows) -> str:
    base = next(row for row in mine if row["schedule"] == BASELINE)
    headers = ["schedule", "simulated ms", "measured ms", "ratio", "speed-up", "theory"]
    cells = [
        [
            row["schedule"],
            f"{1e3 * row['simulated']:.0f}",
            f"{1e3 * row['measured']:.0f}",
            _judged(row["measured"] / row["simulated"]),
            _speed_up(base, row, "measured"),
            _speed_up(base, row, "simulated"),
            _judged(row["measured_async"] / row["simulated_async"]),
            _speed_up(base, row, "measured_async"),
        ]
        for row in mine
    ]
    return table([*headers, "in flight: ratio", "in flight: speed-up"], cells)


def _speed_up(base: dict[str, Any], row: dict[str, Any], column: str) -> str:
    """For the same work: a rank's F takes ``unit``, which is not the same in every row."""
    return f"{base[column] / base['unit'] / (row[column] / row['unit']):.3f}x"


def _judged(ratio: float) -> str:
    return mark(f"{ratio:.3f}", ratio <= TARGET)


def _cases(ranks: int, ratio: Times) -> list[Case]:
    found = [_case(BASELINE, "1f1b", ranks, 1, ratio, split=False)]
    for name, family in SCHEDULES.items():
        if name == "naive" and ranks > 4:  # it takes N times as long as the others
            continue
        with contextlib.suppress(ScheduleError):  # wants more microbatches than ranks
            found.append(_case(name, name, ranks, family.chunks or 2, ratio))
    found.append(_case("interleaved, 4 stages a rank", "interleaved", ranks, 4, ratio))
    found.append(_case("interleaved, 8 stages a rank", "interleaved", ranks, 8, ratio))
    return [*found, *(_auto(ranks, chunks, ratio) for chunks in (1, 2, 4))]


def _auto(ranks: int, chunks: int, ratio: Times) -> Case:
    times = _times(ranks, chunks, ratio)
    stages = ranks * chunks
    costs = Costs([times] * stages, [StageMemory(1.0, 1.0)] * stages)
    plural = "stage" if chunks == 1 else "stages"
    return Case(f"auto, {chunks} {plural} a rank", search(costs, ranks, ranks=ranks), times)


def _case(
    name: str, schedule: str, ranks: int, chunks: int, ratio: Times, *, split: bool = True
) -> Case:
    times = _times(ranks, chunks, ratio)
    built = build(
        schedule,
        ranks * chunks,
        ranks,
        split_backward=split,
        ranks=ranks,
        times=times if split and SCHEDULES[schedule].weights else None,
    )
    return Case(name, built, times)


def _times(ranks: int, chunks: int, ratio: Times) -> Times:
    """Seconds of F, I and W of each of a rank's stages."""
    unit = max(UNITS[ranks], SHORTEST * chunks / min(ratio))
    forward, backward_input, backward_weight = (unit * part / chunks for part in ratio)
    return forward, backward_input, backward_weight


def measure(cases: Sequence[Case], steps: int, timeout: float = 600.0) -> list[Found]:
    """Run every case on as many processes as its schedule has ranks; all must have the same."""
    (ranks,) = {len(case.schedule.ranks) for case in cases}
    return launch(_on_rank, ranks, (list(cases), steps), timeout=timeout)[0]


def repeat(schedule: Schedule, steps: int) -> Schedule:
    """``steps`` steps, one after another on each rank, as ``step_async`` runs them."""
    count = schedule.microbatches
    rows = (
        tuple(
            dataclasses.replace(action, microbatch=action.microbatch + step * count)
            for step in range(steps)
            for action in row
        )
        for row in schedule.ranks
    )
    return dataclasses.replace(schedule, microbatches=count * steps, ranks=tuple(rows))


def _on_rank(cases: list[Case], steps: int) -> list[Found]:
    return [_run(case, steps) for case in cases]


def trainer_of(case: Case) -> PipelineTrainer:
    """A trainer that records its steps; for a batch as ``batch_of`` gives."""
    schedule = case.schedule
    return PipelineTrainer(
        [nn.Identity() for _ in range(schedule.stages)],
        lambda output, target: output,
        lambda parameters: torch.optim.SGD(parameters),
        microbatches=schedule.microbatches,
        schedule=schedule,
        stage_options=StageOptions(
            stage_factory=functools.partial(Sleeping, case=case, clock=Clock())
        ),
        run_options=RunOptions(timeout=60.0, record=True),
    )


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    """Of one number a microbatch."""
    count = case.schedule.microbatches
    return (torch.zeros(count, 1), torch.zeros(count, 1))


def makespans(trainer: PipelineTrainer, batch: tuple[Tensor, Tensor], steps: int) -> list[float]:
    """Seconds from the first action to the last of some steps, after one that does not count."""
    trainer.step(batch)
    spans = []
    for _ in range(steps):
        trainer.step(batch)
        spans.append(trainer.timeline().makespan)
    return spans


def _run(case: Case, steps: int) -> Found:
    schedule, batch = case.schedule, batch_of(case)
    with trainer_of(case) as trainer:
        spans = makespans(trainer, batch, steps)
        trainer.record = False
        dist.barrier()
        steps_in_flight, marks = [], []
        for _ in range(steps + 1):
            steps_in_flight.append(trainer.step_async(batch))
            marks.append(time.perf_counter())
        for each in steps_in_flight:
            each.wait()
    ends = [case.costs.timeline(repeat(schedule, each)).makespan for each in (1, steps + 1)]
    return Found(
        case.name,
        len(schedule.ranks),
        schedule.microbatches,
        case.unit,
        ends[0],
        statistics.median(spans),
        (ends[1] - ends[0]) / steps,
        (marks[-1] - marks[0]) / steps,
    )
