"""What is measured, and how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from examples.families.settings import TINY

from ..page import option
from .theory import BY_LABEL

SMALL: Mapping[str, Mapping[str, object]] = {
    "llama": {"seq": 96},
    "bert": {"seq": 96},
    "mamba": {},
    "resnet": {},
}
"""About 0.1 s a microbatch, forward and backward, on one core."""

SIZES = {"small": SMALL, "tiny": TINY}

FAMILIES = (*SMALL,)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command's options."""

    size: str = option("small", "of models", SIZES)
    families: tuple[str, ...] = option(FAMILIES, "of models", FAMILIES)
    schedules: tuple[str, ...] = option((*BY_LABEL,), "the paper's", BY_LABEL)
    steps: int = option(7, "timed steps of each contender on two ranks")
    rounds: int = option(9, "timed microbatches of a stage by itself")
    scaling_steps: int = option(3, "timed steps of each schedule over stand-in stages")
    ranks: tuple[int, ...] = option((4, 8, 16), "of stand-in stages")
    # Whatever the ranks: shorter ones would measure how fast two cores hand on messages of many.
    unit: float = option(0.06, "seconds of F + I + W of a stand-in stage")
    profiling: float = option(10.0, "seconds of measuring what a model's blocks cost, to cut it by")

    def overrides(self, family: str) -> Mapping[str, object]:
        """Settings of a family."""
        return SIZES[self.size][family]
