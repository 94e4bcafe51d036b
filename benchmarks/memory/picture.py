"""What ranks hold over a step as a picture: a panel a rank, a band an owner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from autosplit.pipeline.ledger.bands import FIXED, OWNERS, Band, StepMemory
from autosplit.text.figures import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "parameters": "#4D4D4D",
    "gradients": "#808080",
    "optimizer state": "#B3B3B3",
    "batch": "#F0E442",
    "saved": "#0072B2",
    "deferred": "#009E73",
    "in transit": "#56B4E9",
    "working": "#E69F00",
}
"""Okabe and Ito's palette, and greys for what every schedule holds."""

_MIB = 2**20


def draw_memory(memory: StepMemory, path: Path, title: str) -> None:
    """A panel for each rank, all to one scale: bytes of each owner on top of each other, and a
    line at what was predicted. Each stretch of a band has the most that there was in it.
    """
    ranks = len(memory.bands)
    figure = Figure((11.0, 1.1 + 1.7 * ranks), facecolor="white", layout="constrained")
    panels = figure.subplots(ranks, sharex=True, sharey=True, squeeze=False)[:, 0]
    owners = [
        owner for owner in OWNERS if any(band.held[owner] for row in memory.bands for band in row)
    ]
    origin = min(bands[0].start for bands in memory.bands)
    for rank, axes in enumerate(panels):
        _draw_rank(axes, rank, memory, owners, origin)
    panels[-1].set_xlabel("milliseconds")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title, parse_math=False)
    figure.savefig(path, dpi=150)


def _draw_rank(
    axes: Axes, rank: int, memory: StepMemory, owners: Sequence[str], origin: float
) -> None:
    bands = memory.bands[rank]
    times, rows = _steps(bands, owners, origin)
    axes.stackplot(
        times, *rows, labels=owners, colors=[COLOURS[owner] for owner in owners], linewidth=0
    )
    predicted = memory.predicted[rank]
    facts = [f"activations at most {size_text(memory.peak_activations[rank])}"]
    if predicted is not None:
        fixed = sum(bands[-1].held[owner] for owner in FIXED)
        axes.axhline((fixed + predicted) / _MIB, color="black", linewidth=0.8, linestyle="--")
        facts.append(f"predicted {size_text(predicted)}")
    axes.set_title(f"rank {rank}: {', '.join(facts)}", loc="left", fontsize=9)
    axes.set_ylabel("MiB", fontsize=9)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)


def _steps(
    bands: Sequence[Band], owners: Sequence[str], origin: float
) -> tuple[list[float], list[list[float]]]:
    """Milliseconds, and MiB of each owner; each stretch level from its start to its end."""
    times = [1e3 * (at - origin) for band in bands for at in (band.start, band.end)]
    rows = [[band.held[owner] / _MIB for band in bands for _ in range(2)] for owner in owners]
    return times, rows
