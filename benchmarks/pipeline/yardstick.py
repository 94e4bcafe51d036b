"""The search against proved optima: counted, not timed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.search.search import search
from autosplit.pipeline.search.survey import survey
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs, simulate
from autosplit.pipeline.simulation.transfer import Transfer

from ..results import Rows, table

TARGET = 1.02
LINK = Transfer(0.5, 2.0, 1.0)
TIMES = {
    "zb 1.5B": [(18.5, 18.1, 9.3)] * 4,
    "zb 6.2B": [(29.7, 29.4, 19.9)] * 4,
    "no I first": [(3.0, 0.0, 5.0), *[(3.0, 3.0, 2.0)] * 3],
    "uneven": [(2.0, 0.0, 4.0), (3.0, 3.0, 2.0), (1.0, 2.0, 1.0), (4.0, 3.0, 3.0)],
    "opposed": [(3.0, 9.0, 1.0), (9.0, 2.0, 5.0), (2.0, 5.0, 2.0), (3.0, 2.0, 8.0)],
}
CASES = [
    (name, deferred, microbatches, cap, transfer)
    for name in TIMES
    for deferred, microbatches, cap, transfer in (
        (0.75, 4, math.inf, Transfer()),
        (0.75, 6, 4.0, Transfer()),
        (0.75, 6, 3.0, LINK),
        (1.3, 5, 3.0, Transfer()),
    )
]


def measure_all() -> Iterator[dict[str, Any]]:
    """One row for each case of four stages, one a rank."""
    from ..optimum import optimum  # with OR-tools, which nothing else needs

    for name, deferred, microbatches, cap, transfer in CASES:
        costs = Costs(TIMES[name], [StageMemory(1.0, deferred)] * 4, transfer)
        found = search(costs, microbatches, cap=cap)
        step = simulate(found, costs.seconds, transfer=transfer).makespan
        best = optimum(costs, microbatches, cap, known=step)
        yield {
            "name": f"{name} {deferred} {microbatches} {cap} {transfer.latency}",
            "times": name,
            "deferred": deferred,
            "microbatches": microbatches,
            "cap": None if math.isinf(cap) else cap,
            "link": transfer.latency > 0,
            "named": _named(costs, microbatches, cap),
            "auto": step,
            "exact": best.step,
            "bound": best.bound,
        }


def _named(costs: Costs, microbatches: int, cap: float) -> float:
    """The shortest named step of one stage a rank within the cap."""
    steps = [
        entry.timeline.makespan
        for entry in survey(costs, microbatches).entries
        if entry.schedule.stages == len(costs.times)
        and entry.schedule.mirror is None
        and entry.name in SCHEDULES
        and max(entry.peaks) <= cap
    ]
    return min(steps, default=math.nan)


def render(rows: Rows) -> str:
    """A line a case, and the worst of them."""
    lines = [
        [
            row["times"],
            f"{row['deferred']:g}",
            str(row["microbatches"]),
            "-" if row["cap"] is None else f"{row['cap']:g}",
            "yes" if row["link"] else "no",
            f"{row['named'] / row['exact']:.3f}x",
            _bold(row["auto"] / row["exact"]),
            "yes" if row["exact"] <= row["bound"] * (1 + 1e-5) else f"{row['bound']:.4g}",
        ]
        for row in rows
    ]
    headers = ["times", "deferred", "M", "cap", "link", "best named", "auto", "proved"]
    worst = max(row["auto"] / row["exact"] for row in rows)
    optimal = sum(row["auto"] <= row["exact"] * (1 + 1e-6) for row in rows)
    return (
        f"{table(headers, lines)}\n\n{optimal} of {len(rows)} searches found the optimum; the "
        f"farthest is {worst:.3f}x."
    )


def _bold(ratio: float) -> str:
    return f"**{ratio:.3f}x**" if ratio > TARGET else f"{ratio:.3f}x"
