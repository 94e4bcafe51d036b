"""What is measured, and how often."""

from __future__ import annotations

import dataclasses

from ..page import option


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command's options."""

    ranks: tuple[int, ...] = option((2, 4, 8), "of a pipeline with one stage each")
    counts: tuple[int, ...] = option((16, 32, 64), "microbatches in a simulated step")
    draws: int = option(20, "simulated lists of each setting")
    repeats: int = option(5, "of finding the order of a list")
    steps: int = option(100, "drawn steps within a limit")
    engine_counts: tuple[int, ...] = option((16, 32), "microbatches in a step of the engine")
    unit: float = option(0.03, "seconds of F of a microbatch of mean length, in the engine")
    rounds: int = option(2, "timed steps of the engine")
    width: int = option(192, "of the model")
    limited_width: int = option(64, "of the model within a limit")
    lists: int = option(8, "timed steps of the model")
