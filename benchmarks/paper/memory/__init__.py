"""Peak memory of every family under every schedule, with and without split."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from ...results import Rows, table
from ..cells import pair
from ..theory import PUBLISHED_MEMORY


def render(rows: Mapping[str, Rows]) -> str:
    """The larger rank's peak, and the ratio of split over fused."""
    low, high = PUBLISHED_MEMORY
    cells, ratios = [], []
    for cell in pair(rows["cells"]):
        ratio = cell.memory_ratio
        ratios.append(ratio)
        cells.append(
            [
                cell.family,
                cell.label,
                str(cell.split["microbatches"]),
                *(_peaks(row["peak_bytes"]) for row in (cell.fused, cell.split)),
                f"{ratio:.3f}x" if ratio <= high else f"**{ratio:.3f}x**",
            ]
        )
    headers = ["family", "schedule", "M", "fused MiB, by rank", "split MiB, by rank"]
    return f"""\
{table([*headers, "largest rank, split / fused"], cells)}

Geometric mean **{statistics.geometric_mean(ratios):.3f}x**, from {min(ratios):.3f}x to \
{max(ratios):.3f}x. The paper: {low:.2f}x to {high:.2f}x on 4 GPUs, and all that forward keeps \
stays until W; here I hands W only what W needs. Parameters, gradients and AdamW's state are in \
both figures, so small models under few microbatches show small ratios."""


def _peaks(found: list[int]) -> str:
    return " / ".join(f"{each / 2**20:.1f}" for each in found)
