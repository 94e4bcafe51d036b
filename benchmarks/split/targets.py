"""Targets beside figures: a cell that misses its target says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Target:
    """What a figure should be.

    Attributes:
        name: of the figure.
        at_most: upper limit, if any.
        at_least: lower limit, if any.
        style: how the figure is written.
    """

    name: str
    at_most: float | None = None
    at_least: float | None = None
    style: str = ".3f"

    @property
    def title(self) -> str:
        """Name and limit, as the head of a column."""
        return f"{self.name} ({self.limit})"

    @property
    def limit(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:{self.style}}"
        return f"≥ {self.at_least:{self.style}}"

    def met(self, figure: float) -> bool:
        """Compared as written: what the reader sees decides."""
        shown = float(f"{figure:{self.style}}".rstrip("%"))
        scale = 100 if self.style.endswith("%") else 1
        above = self.at_least is None or shown >= scale * self.at_least
        return above and (self.at_most is None or shown <= scale * self.at_most)

    def cell(self, figure: float) -> str:
        text = f"{figure:{self.style}}"
        return text if self.met(figure) else f"**{text}**"


def verdicts(figures: Sequence[tuple[Target, Mapping[str, float]]]) -> str:
    """One sentence: which targets are met everywhere, and where each other is missed."""
    lines = []
    for target, found in figures:
        missed = [
            f"{name} ({figure:{target.style}})"
            for name, figure in found.items()
            if not target.met(figure)
        ]
        said = "met everywhere" if not missed else f"missed by {', '.join(missed)}"
        lines.append(f"Target {target.name} {target.limit}: {said}.")
    return "\n".join(lines)
