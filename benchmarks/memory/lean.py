"""Activations and time of lean splits on two real ranks, beside torch's fused 1F1B."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch.distributed.pipelining.schedules import Schedule1F1B

from autosplit.text.figures import quartiles, ratios

from ..pipeline import peers
from ..pipeline.contenders import Contender
from ..results import Rows, Target, table, verdicts
from .settings import Settings

BASELINE = Contender("1F1B, fused", False, Schedule1F1B, split_backward=False)
OURS = tuple(
    Contender(f"{schedule}, {memory}{text}", True, schedule, memory=memory, accumulation=form)
    for schedule in ("1f1b", "zb-h1")
    for memory, form, text in (
        ("balanced", "exact", ""),
        ("lean", "exact", ""),
        ("lean", "fused", ", fused sums"),
    )
)
MEMORY = Target("activations / torch's", at_most=0.8, style=".2f")
TIME = Target("step / torch's", at_most=1.0)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each contender and number of microbatches."""
    rows = peers.measure(
        peers.FACTORY,
        settings.microbatches,
        settings.steps,
        overrides={} if settings.size == "tiny" else peers.OVERRIDES,
        contenders=(BASELINE, *OURS),
    )
    for row in rows:
        yield {"name": f"M={row.microbatches}, {row.schedule}", **dataclasses.asdict(row)}


def render(rows: Rows) -> str:
    """Ratios over the baseline of the same number of microbatches."""
    cells, held, took = [], {}, {}
    base = {row["microbatches"]: row for row in rows if not row["ours"]}
    for row in rows:
        if row["error"]:
            cells.append([row["name"], "fails", row["error"], "", ""])
            continue
        other = base[row["microbatches"]]
        memory = row["activations"] / other["activations"]
        low, time, high = quartiles(ratios(row["rounds"], other["rounds"]))
        judged = "lean" in row["schedule"]
        if judged:
            held[row["name"]], took[row["name"]] = memory, time
        cells.append(
            [
                row["name"],
                f"{row['activations'] / 2**20:.1f}",
                (MEMORY.cell(memory) if judged else f"{memory:.2f}") if row["ours"] else "",
                f"{1e3 * quartiles(row['rounds'])[1]:.1f}",
                f"{TIME.cell(time)} ({low:.2f}-{high:.2f})" if row["ours"] else "",
            ]
        )
    headers = ["", "activations MiB", MEMORY.title, "step ms", TIME.title]
    return f"{table(headers, cells)}\n\n{verdicts([(MEMORY, held), (TIME, took)])}"
