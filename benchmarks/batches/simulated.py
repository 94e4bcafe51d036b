"""Simulated steps over drawn lists, with and without a limit on memory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from autosplit.pipeline.simulation.simulate import Costs

from ..results import Rows, Target, by_setting, table, verdicts
from .contenders import FOUND, IN_ORDER, PADDED, SORTED, WAYS, Contender, Contenders, bound
from .lengths import costs_of, draw
from .settings import Settings

LIMITS = {"no limit": None, "limit 2x": 2.0, "limit 1x": 1.0}
"""Name -> the limit over what 1F1B with filled waits keeps of the list in its order. Without one, a
rank may keep as many of the longest microbatch as there are ranks, as padded 1F1B does."""
OVER_IN_ORDER = Target("over in order", at_most=0.92)
OVER_SORTED = Target("over sorted", at_most=0.95)
WORST = Target("worst", at_most=1.01)
OVER_BOUND = Target("over bound", at_most=1.10)
PLANNING = Target("median, ms", at_most=20.0, style=".1f")


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each limit, number of ranks and number of microbatches."""
    for name, times in LIMITS.items():
        for ranks in settings.ranks:
            for count in settings.counts:
                label = f"{ranks} ranks, {count} microbatches"
                row = _setting(ranks, count, times, settings.draws)
                yield {"name": f"{name}: {label}", "setting": label, **row}


def _setting(ranks: int, count: int, times: float | None, draws: int) -> dict[str, Any]:
    """The steps of each way over the bound, list by list; None where none keeps the limit."""
    source, contenders = random.Random(ranks * count), Contenders(ranks, count)
    steps: dict[str, list[float | None]] = {way: [] for way in WAYS}
    for _ in range(draws):
        costs = costs_of(draw(source, count), ranks)
        cap = cap_of(contenders, costs, ranks, times)
        best, least = contenders.of(costs, cap), bound(costs)
        for way, row in steps.items():
            row.append(best[way].step / least if way in best else None)
    return {"steps": steps}


def cap_of(
    contenders: Contenders, costs: Sequence[Costs], ranks: int, times: float | None
) -> float:
    """The most bytes of a rank."""
    longest = max(each.memory[0].saved for each in costs)
    if times is None:
        return ranks * longest
    fill = next(schedule for schedule in contenders.named if schedule.name == "zb-h1")
    return max(times * max(Contender(fill, costs).peaks), longest)


def render(rows: Rows) -> str:
    """A table for each limit, with the targets."""
    return f"{by_setting(rows, _table)}\n\n{_verdicts(rows)}"


def _table(rows: Rows) -> str:
    cells = []
    for row in rows:
        over = {way: _ratios(row["steps"], way) for way in (IN_ORDER, SORTED, PADDED)}
        both = [*over[IN_ORDER], *over[SORTED]]
        fitting = [step for step in row["steps"][SORTED] if step is not None]
        cells.append(
            [
                row["setting"],
                f"{median(row['steps'][IN_ORDER]):.3f}",
                f"{median(fitting):.3f}" if fitting else "none fits",
                OVER_BOUND.cell(median(row["steps"][FOUND])),
                OVER_IN_ORDER.cell(median(over[IN_ORDER])),
                OVER_SORTED.cell(median(over[SORTED])) if over[SORTED] else "",
                WORST.cell(max(both)),
                f"{1.0 / median(over[PADDED]):.2f}" if over[PADDED] else "none fits",
            ]
        )
    headers = ["setting", "in order / bound", "sorted / bound", "found / bound"]
    headers += ["found / in order", "found / sorted", "worst", "padded / found"]
    return table(headers, cells)


def _ratios(steps: dict[str, list[float | None]], way: str) -> list[float]:
    """The found steps over those of another way, where it keeps the limit."""
    pairs = zip(steps[FOUND], steps[way], strict=True)
    return [mine / theirs for mine, theirs in pairs if mine is not None and theirs is not None]


def _verdicts(rows: Rows) -> str:
    """The medians over all lists without a limit, and the worst of all lists."""
    free = [row for row in rows if row["name"].startswith("no limit")]
    over = {way: [r for row in free for r in _ratios(row["steps"], way)] for way in WAYS}
    worst = {
        row["name"]: max(_ratios(row["steps"], IN_ORDER) + _ratios(row["steps"], SORTED))
        for row in rows
    }
    bounds = [step for row in free for step in row["steps"][FOUND]]
    figures: list[tuple[Target, dict[str, float]]] = [(WORST, worst)]
    if free:
        figures = [
            (OVER_IN_ORDER, {"the median": median(over[IN_ORDER])}),
            (OVER_SORTED, {"the median": median(over[SORTED])}),
            (OVER_BOUND, {"the median": median(bounds)}),
            *figures,
        ]
    return verdicts(figures)


# --- planning -------------------------------------------------------------------------------------


def measure_planning(settings: Settings) -> Iterator[dict[str, Any]]:
    """For each number of ranks and of microbatches, milliseconds to find the order of the first
    list and of later ones, with each limit.
    """
    for ranks in settings.ranks:
        for count in settings.counts:
            source, contenders = random.Random(ranks * count), Contenders(ranks, count)
            seconds = list[float]()
            for _ in range(settings.draws):
                costs = costs_of(draw(source, count), ranks)
                for times in LIMITS.values():
                    cap = cap_of(contenders, costs, ranks, times)
                    repeats = settings.repeats if seconds else 1
                    seconds.append(1e3 * contenders.planning_seconds(costs, cap, repeats))
            first, *later = seconds
            yield {"name": f"{ranks} ranks, {count} microbatches", "first": first, "later": later}


def render_planning(rows: Rows) -> str:
    """The median and the longest time, and that of the first list."""
    cells = [
        [
            row["name"],
            PLANNING.cell(median(row["later"])),
            f"{max(row['later']):.1f}",
            f"{row['first']:.1f}",
        ]
        for row in rows
    ]
    return table(["", PLANNING.title, "longest, ms", "first list, ms"], cells)
