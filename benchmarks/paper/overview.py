"""The folder's page: which tables there are, and what of the paper's figures holds up."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ..results import Results, Rows, table
from . import scaling
from .cells import pair
from .tables import TABLES, complete
from .theory import (
    BY_LABEL,
    PUBLISHED_MEMORY,
    PUBLISHED_RANKS,
    PUBLISHED_THROUGHPUT,
    SCHEDULES,
    verdict,
)

TEMPLATE = """\
# The tables and figures of 2BP, measured again

Written by `python -m benchmarks.paper`; do not edit. The paper is Rae, Lee and Richings,
[arXiv 2405.18047](https://arxiv.org/abs/2405.18047).

{tables}

Each command measures its table and writes its page; `--families` and `--schedules` measure part of
one and keep the other rows, `--pages` only writes the pages anew.

## What holds up

{verdicts}
"""


def overview(results: Results) -> str:
    """``README.md`` of the folder, from what was measured."""
    rows = [
        [
            f"[{each.title}]({name}/README.md)" if complete(name, results) else each.title,
            f"`python -m benchmarks.paper {name}`",
            "yes" if complete(name, results) else "not yet",
        ]
        for name, each in TABLES.items()
    ]
    verdicts = "\n".join(f"- {each}" for each in _verdicts(results))
    return TEMPLATE.format(tables=table(["table", "command", "measured"], rows), verdicts=verdicts)


def _verdicts(results: Results) -> Iterator[str]:
    if results.rows("cells"):
        yield from _cells(results.rows("cells"))
    yield verdict()
    if results.rows("scaling"):
        yield from _standins(results.rows("scaling"))


def _cells(rows: Rows) -> Iterator[str]:
    cells = pair(rows)
    speedups = [cell.split["speedup"] for cell in cells]
    peaks = [cell.memory_ratio for cell in cells]
    low, high = PUBLISHED_THROUGHPUT
    yield (
        f"Throughput: the paper's {low:.2f}x to {high:.2f}x are on 4 GPUs. On two processes split "
        f"is faster in {sum(each > 1.0 for each in speedups)} of {len(speedups)} cells, "
        f"{min(speedups):.2f}x to {max(speedups):.2f}x, geometric mean "
        f"{statistics.geometric_mean(speedups):.2f}x."
    )
    low, high = PUBLISHED_MEMORY
    yield (
        f"Peak memory: {low:.2f}x to {high:.2f}x in the paper, {min(peaks):.2f}x to "
        f"{max(peaks):.2f}x here, where I hands W only what W needs."
    )


def _standins(rows: Rows) -> Iterator[str]:
    found = {(row["ranks"], row["family"], row["label"], row["variant"]): row for row in rows}
    errors = [
        abs(scaling.bubble_of(row) - float(each.split_bubble(count)))
        for (count, family, label, variant), row in found.items()
        for each in SCHEDULES
        if (family, label, variant) == (scaling.EQUAL, each.label, "2bp")
    ]
    if errors:
        yield (
            f"Bubble ratios: with the paper's placement of W and F = I = W, those of the engine "
            f"are within {max(errors):.3f} of the formulas."
        )
    label, key = "1F1B-1", (PUBLISHED_RANKS, scaling.EQUAL)
    if all((*key, label, variant) in found for variant in ("fused", "2bp", "split")):
        fused, paper, ours = (found[*key, label, each] for each in ("fused", "2bp", "split"))
        yield (
            f"Its ideal of {float(BY_LABEL[label].ideal_speedup(PUBLISHED_RANKS)):.2f}x does: over "
            f"stand-in stages {label} on {PUBLISHED_RANKS} ranks reaches "
            f"{fused['measured'] / paper['measured']:.2f}x with the paper's placement of W and "
            f"{fused['measured'] / ours['measured']:.2f}x with autosplit's."
        )
