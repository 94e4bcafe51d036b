"""The same ways through the real engine, over stages that sleep for as long as they cost."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from statistics import median
from typing import Any

from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.ranks.launch import launch

from ..pipeline.standin import Case, batch_of, makespans, trainer_of
from ..results import Rows, Target, by_setting, table
from .contenders import FOUND, WAYS, Contenders
from .lengths import costs_of, draw
from .settings import Settings
from .simulated import cap_of

RATIO = Target("measured / simulated", at_most=1.05)


@dataclasses.dataclass(frozen=True)
class ListCase(Case):
    """A schedule over microbatches that cost differently."""

    microbatches: tuple[Costs, ...] = ()

    def seconds(self, action: Action) -> float:
        return self.microbatches[action.microbatch].seconds(action)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each way, number of ranks and number of microbatches."""
    for ranks in settings.ranks:
        for count in settings.engine_counts:
            contenders = Contenders(ranks, count)
            costs = costs_of(draw(random.Random(count), count), ranks, settings.unit)
            best = contenders.of(costs, cap_of(contenders, costs, ranks, None))
            cases = [
                ListCase(way, best[way].schedule, (0.0, 0.0, 0.0), tuple(best[way].costs))
                for way in WAYS
            ]
            seconds = launch(_on_rank, ranks, (cases, settings.rounds), timeout=1200.0)[0]
            for way, steps in zip(WAYS, seconds, strict=True):
                label = f"{ranks} ranks, {count} microbatches"
                row = {"simulated": best[way].step, "measured": steps}
                yield {"name": f"{label}: {way}", "way": way, **row}


def _on_rank(cases: list[ListCase], steps: int) -> list[list[float]]:
    seconds = []
    for case in cases:
        with trainer_of(case) as trainer:
            seconds.append(makespans(trainer, batch_of(case), steps))
    return seconds


def render(rows: Rows) -> str:
    """A table for each setting."""
    return by_setting(rows, _table)


def _table(rows: Rows) -> str:
    found = next((row for row in rows if row["way"] == FOUND), rows[0])  # rows come one by one
    cells = [
        [
            row["way"],
            f"{1e3 * row['simulated']:.0f}",
            f"{1e3 * median(row['measured']):.0f}",
            RATIO.cell(median(row["measured"]) / row["simulated"]),
            f"{median(row['measured']) / median(found['measured']):.3f}",
        ]
        for row in rows
    ]
    return table(["way", "simulated ms", "measured ms", RATIO.title, "over found"], cells)
