"""What is measured, and how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from examples.families.settings import TINY

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
    """Attributes:
    size: key of ``SIZES``.
    families: names of families.
    schedules: labels of the paper's schedules.
    steps: timed steps of each contender on real ranks.
    rounds: timed microbatches of a stage by itself.
    scaling_steps: timed steps of each schedule over stand-in stages.
    ranks: numbers of ranks of stand-in stages.
    unit: seconds of F + I + W of a stand-in stage, whatever the ranks: shorter ones would measure
        how fast two cores hand on the messages of many ranks.
    profiling: seconds of measuring what a model's blocks cost, to cut it by.
    """

    size: str
    families: tuple[str, ...]
    schedules: tuple[str, ...]
    steps: int
    rounds: int
    scaling_steps: int
    ranks: tuple[int, ...]
    unit: float
    profiling: float = 10.0

    def overrides(self, family: str) -> Mapping[str, object]:
        """Settings of a family."""
        return SIZES[self.size][family]
