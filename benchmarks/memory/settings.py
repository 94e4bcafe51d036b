"""What is measured, and how often."""

from __future__ import annotations

import dataclasses

from ..page import option
from ..paper.settings import FAMILIES, SIZES


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command's options."""

    size: str = option("small", '"tiny" only shows that the measuring works', SIZES)
    families: tuple[str, ...] = option(FAMILIES, "of models", FAMILIES)
    microbatches: tuple[int, ...] = option((2, 4, 8), "M on two real ranks")
    steps: int = option(12, "timed steps of each contender")
    rounds: int = option(15, "timed microbatches of a stage by itself")
    ranks: tuple[int, ...] = option((4, 8), "of stand-in stages")
