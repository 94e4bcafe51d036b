"""Pictures by matplotlib, which may not be there; and what ranks hold over a step as one: a panel a
rank, a band an owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.errors import AutosplitError
from autosplit.pipeline.ledger.bands import FIXED, Band, StepMemory, owners_of
from autosplit.text.figures import size_text
from autosplit.text.files import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "parameters": "#4D4D4D",
    "gradients": "#808080",
    "optimizer state": "#B3B3B3",
    "batch": "#F0E442",
    "saved": "#0072B2",
    "deferred": "#009E73",
    "evicted here": "#CC79A7",
    "in transit": "#56B4E9",
    "working": "#E69F00",
}
"""Okabe and Ito's palette, and greys for what every schedule holds."""

FORMATS = (".pdf", ".png", ".svg")
_MIB = 2**20


def check_format(path: str | Path, what: str) -> None:
    """Refuse a file whose name says no format.

    Raises:
        AutosplitError: a suffix other than .pdf, .png and .svg.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise AutosplitError(
            f"cannot draw {what} into {str(path)!r}: expected a name that ends in "
            f"{', '.join(FORMATS)}"
        )


def new_figure(what: str, size: tuple[float, float], **more: Any) -> Figure:
    """An empty figure of so many inches, for a picture of ``what``.

    Raises:
        AutosplitError: no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise AutosplitError(
            f"drawing {what} needs matplotlib ({error}); run: pip install autosplit[plot]"
        ) from error
    # The object interface: pyplot would register the figure in global state and pick a display.
    return Figure(figsize=size, facecolor="white", **more)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure into a file, whose suffix names the format."""
    with writing(path):
        figure.savefig(path, dpi=150)


def draw_memory(memory: StepMemory, path: str | Path, *, title: str | None = None) -> None:
    """Draw ``memory_figure(memory, title=title)`` into a file; its suffix names the format.

    Raises:
        AutosplitError: a suffix other than .pdf, .png and .svg, or no matplotlib.
        OutputError: the file cannot be written.
    """
    check_format(path, "memory")
    save_figure(memory_figure(memory, title=title), path)


def memory_figure(memory: StepMemory, *, title: str | None = None) -> Figure:
    """A panel for each rank, all to one scale: bytes of each owner on top of each other, and a
    line at what was predicted. Each stretch of a band has the most that there was in it.

    Raises:
        AutosplitError: no matplotlib.
    """
    ranks = len(memory.bands)
    figure = new_figure("memory", (11.0, 1.1 + 1.7 * ranks), layout="constrained")
    panels = figure.subplots(ranks, sharex=True, sharey=True, squeeze=False)[:, 0]
    owners = [*owners_of(memory.bands)]
    origin = min(bands[0].start for bands in memory.bands)
    for rank, axes in enumerate(panels):
        _draw_rank(axes, rank, memory, owners, origin)
    panels[-1].set_xlabel("milliseconds")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    if title is not None:
        figure.suptitle(title, parse_math=False)
    return figure


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
