"""Throughput of every family under every schedule, with and without split."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from ...results import Rows, table
from ..cells import RANKS, pair
from ..theory import BY_LABEL, PUBLISHED_THROUGHPUT, SCHEDULES, verdict


def render(rows: Mapping[str, Rows]) -> str:
    """Our speed-ups beside the ideals and the paper's, then torch's time beside ours."""
    cells, speedups = [], []
    for cell in pair(rows["cells"]):
        speedup = cell.split["speedup"]
        speedups.append(speedup)
        cells.append(
            [
                cell.family,
                cell.label,
                str(cell.split["microbatches"]),
                *(_time(row["median_s"], row["spread_s"]) for row in (cell.fused, cell.split)),
                f"{speedup:.3f}x" if speedup > 1.0 else f"**{speedup:.3f}x**",
                f"{cell.split['ideal_speedup']:.3f}x",
                f"{float(BY_LABEL[cell.label].ideal_speedup(RANKS)):.3f}x",
            ]
        )
    headers = ["family", "schedule", "M", "fused ms", "split ms", "speed-up", "ideal"]
    low, high = PUBLISHED_THROUGHPUT
    faster = sum(each > 1.0 for each in speedups)
    text = f"""\
{table([*headers, "ideal, F = I = W"], cells)}

Split is faster in {faster} of {len(speedups)} cells; geometric mean \
**{statistics.geometric_mean(speedups):.3f}x**, from {min(speedups):.3f}x to {max(speedups):.3f}x.

The paper: {low:.2f}x to {high:.2f}x on 4 GPUs. {verdict()}"""
    return f"{text}\n\n{_peers(rows['peers'])}" if rows["peers"] else text


def _time(median: float, spread: float) -> str:
    return f"{1e3 * median:.0f} ± {1e3 * spread:.0f}"


def _peers(rows: Rows) -> str:
    found = {(row["family"], row["microbatches"], row["schedule"]): row for row in rows}
    cells, ratios = [], []
    for family in dict.fromkeys(row["family"] for row in rows):
        for each in SCHEDULES:
            count = each.microbatches(RANKS)
            if not each.torch or (family, count, each.name) not in found:
                continue
            ours = found[family, count, each.name]
            theirs = found[family, count, each.torch.removeprefix("Schedule")]
            error = ours["error"] or theirs["error"]
            if error:
                cells.append([family, each.label, error.replace("|", "/"), "", "", "", ""])
                continue
            ratio = theirs["seconds"] / ours["seconds"]
            ratios.append(ratio)
            cells.append(
                [
                    family,
                    each.label,
                    *(_time(row["seconds"], row["spread"]) for row in (ours, theirs)),
                    f"{ratio:.3f}x" if ratio > 1.0 else f"**{ratio:.3f}x**",
                    f"{ours['peak'] / 2**20:.0f}",
                    f"{theirs['peak'] / 2**20:.0f}",
                ]
            )
    headers = ["family", "schedule", "ours, split, ms", "torch ms", "torch / ours"]
    mean = f"\n\nGeometric mean {statistics.geometric_mean(ratios):.3f}x." if ratios else ""
    return f"""\
## Beside torch.distributed.pipelining

Stages of equal layer counts, cut by hand ([families](../../../examples/families/by_hand.py)), the
same for both: torch's can neither share a tied weight nor take tensors past a stage, so weights are
not tied here. The same batches, forward and backward without the optimizer, contenders alternating
in one run. Torch has GPipe and 1F1B, both fused; the paper's naive schedule it has not. Peaks are
what the larger rank allocates in a step.

{table([*headers, "our peak MiB", "torch's peak MiB"], cells)}{mean}"""
