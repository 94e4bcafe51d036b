"""What the paper publishes, and what its schedules can give at best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class PaperSchedule:
    """One of the paper's schedules. Bubble ratios hold for F = I = W and N ranks.

    Attributes:
        label: what the paper calls it.
        name: what autosplit calls it.
        microbatches: how many a step has, by N.
        fused_bubble: bubble ratio by N without split, the backward taking I + W.
        split_bubble: bubble ratio by N with every W after the cool-down, as in the paper.
    """

    label: str
    name: str
    microbatches: Callable[[int], int]
    fused_bubble: Callable[[int], Fraction]
    split_bubble: Callable[[int], Fraction]

    def ideal_speedup(self, ranks: int) -> Fraction:
        """Fused step over split step: both do the same work, so their busy shares say it."""
        return (1 - self.split_bubble(ranks)) / (1 - self.fused_bubble(ranks))

    def build(self, ranks: int, *, split: bool, weights: str | None = None) -> Schedule:
        """The schedule with a stage on each of N ranks."""
        count = self.microbatches(ranks)
        return build(self.name, ranks, count, split_backward=split, weights=weights)


SCHEDULES = (
    PaperSchedule(
        "naive",
        "naive",
        lambda n: 1,
        lambda n: Fraction(n - 1, n),
        lambda n: Fraction(2 * (n - 1), 2 * n + 1),
    ),
    PaperSchedule(
        "GPipe",
        "gpipe",
        lambda n: n,
        lambda n: Fraction(n - 1, 2 * n - 1),
        lambda n: Fraction(2 * (n - 1), 5 * n - 2),
    ),
    PaperSchedule(
        "1F1B-1",
        "1f1b",
        lambda n: n,
        lambda n: Fraction(n - 1, 2 * n - 1),
        lambda n: Fraction(n - 1, 4 * n - 1),
    ),
    PaperSchedule(
        "1F1B-2",
        "1f1b",
        lambda n: 2 * n,
        lambda n: Fraction(n - 1, 3 * n - 1),
        lambda n: Fraction(n - 1, 7 * n - 1),
    ),
)

BY_LABEL = {schedule.label: schedule for schedule in SCHEDULES}

PUBLISHED_RANKS = 4
PUBLISHED_THROUGHPUT = (1.10, 1.70)
"""Least and greatest of the paper's speed-ups; the greatest is the 7B model's under 1F1B-1."""
PUBLISHED_MEMORY = (1.02, 2.67)
"""Least and greatest of the paper's ratios of peak memory."""


def zero_bubble_ceiling(ranks: int) -> Fraction:
    """What no schedule with M = N exceeds over a fused 1F1B, for F = I = W (Qi et al.)."""
    return Fraction(2 * ranks - 1, ranks)


def verdict() -> str:
    """Whether the greatest published speed-up can come from its schedule."""
    greatest, schedule = PUBLISHED_THROUGHPUT[1], BY_LABEL["1F1B-1"]
    ideal, ceiling = schedule.ideal_speedup(PUBLISHED_RANKS), zero_bubble_ceiling(PUBLISHED_RANKS)
    fused, split = (
        bubble(PUBLISHED_RANKS) for bubble in (schedule.fused_bubble, schedule.split_bubble)
    )
    relation = "exceeds" if greatest > ideal else "is within"
    text = (
        f"The paper's greatest speed-up, {greatest:.2f}x for a 7B transformer under 1F1B-1 on "
        f"{PUBLISHED_RANKS} GPUs, {relation} the ideal of that schedule: the bubble ratio falls "
        f"from {fused} to {split}, and (1 - {split}) / (1 - {fused}) = {float(ideal):.2f}x for "
        "F = I = W. "
    )
    if greatest > ideal:
        text += (
            f"It is even close to the ceiling of every schedule at M = N, (2N - 1) / N = "
            f"{float(ceiling):.2f}x. So {greatest / float(ideal):.2f}x of it cannot come from "
            "overlapping weight gradients; the paper's baseline also emptied the CUDA cache in "
            "every step, and its layers are written by hand against autograd's."
        )
    return text
