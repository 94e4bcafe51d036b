"""Configurations of a model on some devices, ranked by their predicted steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosplit.errors import PlanError
from autosplit.planner.cuts.solve import CapError, Solution
from autosplit.text.figures import size_text

NEAR = 0.01
"""Of the shortest step: by less than this, no plan is known to be better than another."""


@dataclass(frozen=True)
class Configuration:
    """Stages, schedule and memory setting of one way to run a model.

    Attributes:
        stages: N.
        ranks: P.
        microbatches: M.
        microbatch_size: samples in each.
        schedule: a key of ``pipeline.SCHEDULES``, or ``"auto"``, see ``pipeline.search``.
        fused: whether backwards are full ones.
        memory: the memory setting.
        solution: its stages and the predicted step; None where it cannot run.
        least: bytes a rank that it would need, where that is over the cap.
        lost: why it is not the best; empty for the best.
    """

    stages: int
    ranks: int
    microbatches: int
    microbatch_size: int
    schedule: str
    fused: bool
    memory: str | int
    solution: Solution | None = None
    least: float | None = None
    lost: str = ""

    @property
    def key(self) -> tuple[float, float]:
        """Seconds of a step, then bytes of the fullest rank; what cannot run comes last."""
        if self.solution is None:
            return math.inf, self.least or math.inf
        return self.solution.step, max(self.solution.peaks)


def ranked(found: Sequence[Configuration]) -> list[Configuration]:
    """The best first, each with why it lost: of those whose steps are within a hundredth of the
    shortest, which is less than a prediction is worth, the one that holds least.

    Raises:
        CapError: none fits under the cap; says the least cap that would do.
        PlanError: none can run.
    """
    ordered = sorted(found, key=lambda each: each.key)
    shortest, _ = ordered[0].key
    if math.isinf(shortest):
        raise _nothing(ordered)
    near = (each for each in ordered if each.key[0] <= (1.0 + NEAR) * shortest)
    first = min(near, key=lambda each: each.key[::-1])
    others = (each for each in ordered if each is not first)
    return [first, *(_with_reason(each, first.solution) for each in others)]


def _nothing(ordered: Sequence[Configuration]) -> PlanError:
    first = ordered[0]
    if first.least is not None:
        return CapError(
            f"nothing fits: the least cap is {size_text(math.ceil(first.least))} a rank "
            f"({first.least:,.0f} bytes), with {first.schedule} and {first.microbatches} "
            f"microbatches of {first.microbatch_size}, {first.stages} stages, memory "
            f"{first.memory!r}: raise the cap, or use more devices or smaller microbatches",
            first.least,
        )
    schedules: dict[str, dict[str, None]] = {}
    for each in ordered:
        schedules.setdefault(each.lost, {})[each.schedule] = None
    if len(schedules) == 1:
        return PlanError(f"nothing can run: {first.lost}")
    reasons = (f"{lost} ({', '.join(names)})" for lost, names in schedules.items())
    return PlanError("nothing can run: " + "; ".join(reasons))


def _with_reason(one: Configuration, best: Solution | None) -> Configuration:
    if one.solution is None or best is None:
        return one
    slower = one.solution.step / best.step - 1.0
    if slower >= 0.0005:
        return replace(one, lost=f"slower by {slower:.1%}")
    more = max(one.solution.peaks) - max(best.peaks)
    if slower <= -0.0005:
        lost = f"faster by {-slower:.1%}, but holds {size_text(math.ceil(more))} more"
        return replace(one, lost=lost)
    return replace(
        one, lost=f"as fast, but holds {size_text(math.ceil(more))} more" if more > 0 else "as fast"
    )
