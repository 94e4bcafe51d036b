"""``memory_limit`` on two real ranks: is it kept, predicted and simulated, with the same bits?"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

import autosplit
from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer, RunOptions
from autosplit.pipeline.ledger.prediction import stage_memory
from autosplit.pipeline.schedule.schedule import ActionKind
from autosplit.pipeline.simulation.simulate import Costs, median_durations
from autosplit.ranks.launch import launch
from examples.families import FAMILIES, Family

from ..links import measure_transfer
from ..paper.settings import SIZES
from ..results import Rows, Target, table, verdicts
from .settings import Settings

RANKS = 2
SCHEDULES = ("gpipe", "1f1b")
SHARE = 0.6
_SETTLING = 8  # steps after which a schedule is settled and warm

KEPT = Target("largest / limit", at_most=1.0, style=".3f")
OFF = Target("predicted - measured", at_most=0.05, style=".1%")
SIMULATED = Target("step - simulated", at_most=0.03, style=".1%")


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family and schedule whose peak is cut."""
    for family in settings.families:
        args = (family, settings.size, settings.microbatches[-1], settings.steps)
        yield from launch(_on_rank, RANKS, args, timeout=1200.0)[0]


def _on_rank(family: str, size: str, microbatches: int, steps: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    subject = FAMILIES[family](**SIZES[size][family])
    return [_compare(family, subject, name, microbatches, steps) for name in SCHEDULES]


def _compare(
    family: str, subject: Family, schedule: str, microbatches: int, steps: int
) -> dict[str, Any]:
    batch = subject.batch_fn(0, microbatches * subject.microbatch_size)

    def trainer(limit: int | None = None, store: str | None = None) -> PipelineTrainer:
        plan = autosplit.partition(
            subject.build(),
            subject.example(),
            cut_at=subject.cut_by_hand(RANKS),
            microbatches=microbatches,
            costs="estimate",
        )
        return PipelineTrainer(
            plan,
            subject.loss_fn,
            lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            microbatches=microbatches,
            schedule=schedule,
            memory_limit=limit,
            run_options=RunOptions(timeout=300.0, store=store),
        )

    with trainer() as plain:
        plain.forward_backward(batch)
        gradients = {
            stage: {name: gradient.clone() for name, gradient in found.items()}
            for stage, found in plain.gradients().items()
        }
        plain.optimizer.zero_grad()  # type: ignore[union-attr]
        plain.record = "memory"
        plain.forward_backward(batch)
        before = plain.memory()
    most = max(_totals(before))
    limit = int(max(before.fixed) + SHARE * (most - max(before.fixed)))
    row = {
        "name": f"{family}, {schedule}",
        "plain": _totals(before),
        "fixed": before.fixed,
        "limit": limit,
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            with trainer(limit, folder) as limited:
                return row | _within(limited, batch, gradients, steps)
        except PipelineError as error:
            return row | {"error": str(error)}


def _totals(memory: Any) -> list[int]:
    pairs = zip(memory.peak_activations, memory.fixed, strict=True)
    return [activations + fixed for activations, fixed in pairs]


def _within(
    trainer: PipelineTrainer,
    batch: Any,
    gradients: dict[int, dict[str, torch.Tensor]],
    steps: int,
) -> dict[str, Any]:
    """What a trainer does within its limit, once its schedule is settled."""
    for _ in range(_SETTLING):
        trainer.step(batch)
    trainer.forward_backward(batch)
    same = all(
        torch.equal(gradient, gradients[stage][name])
        for stage, found in trainer.gradients().items()
        for name, gradient in found.items()
    )
    trainer.optimizer.zero_grad()  # type: ignore[union-attr]
    trainer.record = True
    timelines = []
    for _ in range(max(3, steps)):
        trainer.step(batch)
        timelines.append(trainer.timeline())
    trainer.record = "memory"
    trainer.step(batch)
    memory = trainer.memory()
    simulated = _simulated(trainer, [each.spans for each in timelines])
    with trainer.together("comparing gradients") as groups:
        bits = all(groups.gather(same))
    return {
        "kinds": sorted({a.kind.name for row in trainer.schedule.ranks for a in row}),
        "schedule": trainer.schedule.name,
        "measured": _totals(memory),
        "activations": memory.peak_activations,
        "predicted": memory.predicted,
        "same": bits,
        "seconds": [each.makespan for each in timelines],
        "simulated": simulated,
    }


def _simulated(trainer: PipelineTrainer, steps: Any) -> float:
    """The step by its actions' measured times, the links and the stores."""
    costs = measured_costs(trainer, steps, [(0, 1)])
    transfer = dataclasses.replace(costs.transfer, host=trainer.store_link())
    return dataclasses.replace(costs, transfer=transfer).timeline(trainer.schedule).step_time


def measured_costs(trainer: PipelineTrainer, steps: Any, pairs: list[tuple[int, int]]) -> Costs:
    """What stages were measured to take, and keep, with the links between pairs of ranks."""
    durations = median_durations(steps)
    with trainer.together("measuring links") as groups:
        transfer = measure_transfer(groups, trainer.device, pairs)
        parts = groups.gather({i: stage_memory(each) for i, each in trainer.stages.items()})
    memory = {index: each for part in parts for index, each in part.items()}
    times = []
    for stage in range(trainer.schedule.stages):
        forward, inputs, weights, both = (
            durations.get((stage, ActionKind(kind)), 0.0) for kind in "FIWB"
        )
        # Where no backward was split, whichever half of it is which.
        times.append((forward, inputs or both / 2, weights or both / 2))
    return Costs(times, [memory[stage] for stage in range(len(times))], transfer)


def render(rows: Rows) -> str:
    """A row a family and schedule."""
    cells = []
    judged: dict[Target, dict[str, float]] = {KEPT: {}, OFF: {}, SIMULATED: {}}
    for row in rows:
        plain = f"{max(row['plain']) / 2**20:.1f}"
        fixed = f"{max(row['fixed']) / 2**20:.1f}"
        head = [row["name"], plain, fixed, f"{row['limit'] / 2**20:.1f}"]
        if "error" in row:
            cells.append([*head, "refused", "", "", "", "", row["error"][:160]])
            continue
        pairs = zip(row["predicted"], row["activations"], strict=True)
        found = {
            KEPT: max(row["measured"]) / row["limit"],
            OFF: max(abs(predicted / measured - 1.0) for predicted, measured in pairs),
            SIMULATED: abs(statistics.median(row["seconds"]) / row["simulated"] - 1.0),
        }
        for target, figure in found.items():
            judged[target][row["name"]] = figure
        moves = [kind for kind in row["kinds"] if ActionKind[kind].is_memory]
        cells.append(
            [
                *head,
                *(target.cell(figure) for target, figure in found.items()),
                "yes" if row["same"] else "**no**",
                f"{1e3 * statistics.median(row['seconds']):.0f}",
                ", ".join(moves).lower() or "order only",
            ]
        )
    headers = ["", "plain MiB", "fixed MiB", "limit MiB", *(target.title for target in judged)]
    text = table([*headers, "same gradients", "step ms", "by"], cells)
    return f"{text}\n\n{verdicts([*judged.items()])}"
