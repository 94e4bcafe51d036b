"""What is measured, and how often."""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class Settings:
    """Attributes:
    size: "small" or "tiny", which only shows that the measuring works.
    families: names of families.
    microbatches: M on two real ranks.
    steps: timed steps of each contender.
    rounds: timed microbatches of a stage by itself.
    ranks: numbers of ranks of stand-in stages.
    seconds: that the exact solver has for a case.
    folder: for pictures; None for none.
    """

    size: str
    families: tuple[str, ...]
    microbatches: tuple[int, ...]
    steps: int
    rounds: int
    ranks: tuple[int, ...]
    seconds: float = 60.0
    folder: pathlib.Path | None = None
