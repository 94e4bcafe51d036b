"""Ours beside torch.distributed.pipelining on 2, 4 and 8 ranks that compute for real."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..results import Rows, table
from . import peers
from .contenders import ON_MORE_RANKS

RANKS = (2, 4, 8)
LAYERS = {"layers": "16", "seq": "64"}  # two stages of a layer on each of eight ranks
_COLUMNS = {each.name: "autosplit" if each.ours else "torch" for each in ON_MORE_RANKS}


def measure(counts: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each number of ranks and contender, with M = 2N, where each rank has a core."""
    for ranks in counts:
        if ranks > len(os.sched_getaffinity(0)):
            continue
        found = peers.measure(
            peers.FACTORY, (2 * ranks,), rounds, "eager", LAYERS, ON_MORE_RANKS, ranks
        )
        yield {
            "name": f"{ranks} ranks",
            "ranks": ranks,
            "contenders": {row.schedule: dataclasses.asdict(row) for row in found},
        }


def render(rows: Rows) -> str:
    """Milliseconds of a step, and the peak of the fullest rank, a line for each number of ranks."""
    headers = ["ranks", *(f"{whose} {name}" for name, whose in _COLUMNS.items()), "best over best"]
    steps = [
        [row["ranks"], *_each(row, _step), _best([*row["contenders"].values()])] for row in rows
    ]
    peaks = [[row["ranks"], *_each(row, _peak)] for row in rows]
    return "\n\n".join(
        [
            "Milliseconds of a step; *best over best* is torch's shortest over ours:",
            table(headers, steps),
            "Peak of the fullest rank in a step, without parameters, in MiB:",
            table(headers[:-1], peaks),
        ]
    )


def _each(row: dict[str, Any], told: Callable[[dict[str, Any]], str]) -> list[str]:
    return [told(row["contenders"][name]) for name in _COLUMNS]


def _step(row: dict[str, Any]) -> str:
    return "fails" if row["error"] else f"{1e3 * statistics.median(row['rounds']):.0f}"


def _peak(row: dict[str, Any]) -> str:
    return "fails" if row["error"] else f"{row['peak'] / 2**20:.0f}"


def _best(contenders: Sequence[dict[str, Any]]) -> str:
    ours, theirs = (
        min(
            statistics.median(each["rounds"])
            for each in contenders
            if each["ours"] is mine and not each["error"]
        )
        for mine in (True, False)
    )
    return f"{theirs / ours:.2f}x"
