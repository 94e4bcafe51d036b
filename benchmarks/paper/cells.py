"""Every family under every schedule of the paper, fused against split, on two real ranks."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

from autosplit.compare import run as comparison
from autosplit.compare.run import compare
from autosplit.errors import PipelineError

from ..results import Rows, mark, table
from .settings import Settings
from .theory import BY_LABEL, PUBLISHED_MEMORY, PUBLISHED_THROUGHPUT, SCHEDULES, verdict

RANKS = 2


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """Two rows a cell; fused and split alternate step by step in one run."""
    for family in settings.families:
        chosen = [BY_LABEL[label] for label in settings.schedules]
        results = compare(
            comparison.Settings(
                f"examples.families.automatic:{family}",
                settings.overrides(family),
                stages=RANKS,
                ranks=RANKS,
                cases=[(each.name, each.microbatches(RANKS)) for each in chosen],
                steps=settings.steps,
                profiling=settings.profiling,
            )
        )
        if results is None:
            raise PipelineError("run this without torchrun: it starts its ranks itself")
        labels = [label for label in settings.schedules for _ in (False, True)]
        for label, (row, *_) in zip(labels, results, strict=True):
            yield {
                "name": f"{family}, {label}, {'split' if row.split else 'fused'}",
                "family": family,
                "label": label,
                **dataclasses.asdict(row),
            }


@dataclasses.dataclass(frozen=True)
class Cell:
    """The two rows of one family and schedule."""

    family: str
    label: str
    fused: dict[str, Any]
    split: dict[str, Any]

    @property
    def memory_ratio(self) -> float:
        """Split over fused, of the rank with the largest peak."""
        return float(max(self.split["peak_bytes"]) / max(self.fused["peak_bytes"]))


def pair(rows: Rows) -> list[Cell]:
    """Cells by family, then in the paper's order of schedules."""
    found = {(row["family"], row["label"], row["split"]): row for row in rows}
    families = dict.fromkeys(row["family"] for row in rows)
    return [
        Cell(
            family,
            each.label,
            found[family, each.label, False],
            found[family, each.label, True],
        )
        for family in families
        for each in SCHEDULES
        if (family, each.label, True) in found
    ]


def render(rows: Rows) -> str:
    """A row for each family and schedule, and the paper's figures beside."""
    cells, found = [], pair(rows)
    for cell in found:
        both = cell.fused, cell.split
        speedup, ratio = cell.split["speedup"], cell.memory_ratio
        cells.append(
            [
                cell.family,
                cell.label,
                str(cell.split["microbatches"]),
                *(f"{1e3 * row['median_s']:.0f} ± {1e3 * row['spread_s']:.0f}" for row in both),
                mark(f"{speedup:.3f}x", speedup > 1.0),
                f"{cell.split['ideal_speedup']:.3f}x",
                f"{float(BY_LABEL[cell.label].ideal_speedup(RANKS)):.3f}x",
                *(f"{row['bubble']:.3f}" for row in both),
                *(f"{max(row['peak_bytes']) / 2**20:.1f}" for row in both),
                f"{ratio:.3f}x",
            ]
        )
    headers = ["family", "schedule", "M", "fused ms", "split ms", "speed-up", "ideal"]
    headers += ["ideal, F = I = W", "bubble, fused", "split", "peak MiB, fused", "split"]
    speedups = [cell.split["speedup"] for cell in found]
    ratios = [cell.memory_ratio for cell in found]
    low, high = PUBLISHED_THROUGHPUT
    least, most = PUBLISHED_MEMORY
    return f"""\
{table([*headers, "split / fused"], cells)}

Split is faster in {sum(each > 1.0 for each in speedups)} of {len(speedups)} cells; geometric mean
{statistics.geometric_mean(speedups):.3f}x, from {min(speedups):.3f}x to {max(speedups):.3f}x; the \
paper has {low:.2f}x to {high:.2f}x on 4 GPUs.
{verdict()}

Peaks are {min(ratios):.3f}x to {max(ratios):.3f}x of fused ones, geometric mean
{statistics.geometric_mean(ratios):.3f}x; the paper: {least:.2f}x to {most:.2f}x, where all that
forward keeps stays until W. Here I hands W only what W needs."""
