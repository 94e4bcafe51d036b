"""W of several microbatches: one by one, with the product adding, or as one call."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autosplit.pipeline import launch

from ...results import Rows, table
from ..settings import Settings
from .steps import RANKS, WAYS, Found, alternating

COUNTS = (2, 4)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family and number of microbatches; the trainers take turns in one run."""
    for family in settings.families:
        args = (family, settings.overrides(family), COUNTS, settings.steps)
        ranks = launch(alternating, RANKS, args, timeout=900.0, threads=1)
        for count, *found in zip(COUNTS, *ranks, strict=True):
            yield {"name": f"{family}, {count} microbatches", **_united(found)}


def _united(found: Sequence[Mapping[str, Found]]) -> dict[str, Any]:
    """What the ranks measured as that of a step, which is over when the later one is done."""
    every = {way: [rank[way] for rank in found] for way in WAYS}
    return {
        "steps": {
            way: [*map(max, zip(*(each.steps for each in ranks), strict=True))]
            for way, ranks in every.items()
        },
        "weights": {
            way: [*map(sum, zip(*(each.weights for each in ranks), strict=True))]
            for way, ranks in every.items()
        },
        "peak": {way: max(each.peak for each in ranks) for way, ranks in every.items()},
        "calls": {way: sum(each.calls for each in ranks) for way, ranks in every.items()},
        "gap": {way: max(each.gap for each in ranks) for way, ranks in every.items()},
    }


def render(rows: Mapping[str, Rows]) -> str:
    """Time of W and of the step over those of one by one, memory, and calls of W in a step."""
    first, *others = WAYS
    found = rows["joined"]
    return "\n\n".join(
        [
            table(
                ["W of a step", f"{first} ms", *(f"{way} / {first}" for way in others)],
                [_times(row, "weights") for row in found],
            ),
            table(
                ["step", f"{first} ms", *(f"{way} / {first}" for way in others)],
                [_times(row, "steps") for row in found],
            ),
            table(
                ["peak MiB", *WAYS],
                [
                    [row["name"], *(f"{row['peak'][way] / 2**20:.1f}" for way in WAYS)]
                    for row in found
                ],
            ),
            table(
                ["calls of W in a step", *WAYS, "distance of gradients"],
                [
                    [
                        row["name"],
                        *(str(row["calls"][way]) for way in WAYS),
                        f"{row['gap'][others[-1]]:.0e}",
                    ]
                    for row in found
                ],
            ),
        ]
    )


def _times(row: Mapping[str, Any], what: str) -> list[str]:
    baseline, *others = (row[what][way] for way in WAYS)
    ratios = [
        statistics.median(mine / base for mine, base in zip(each, baseline, strict=True))
        for each in others
    ]
    return [
        row["name"],
        f"{1e3 * statistics.median(baseline):.1f}",
        *(f"{ratio:.3f}" for ratio in ratios),
    ]
