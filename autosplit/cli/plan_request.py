"""What ``autosplit plan`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from autosplit.planner.costs.limits import Limits
from autosplit.planner.cuts.rank_measurement import check_seconds
from autosplit.planner.plan.plan_search import SearchSpace


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for.

    Attributes:
        devices: one rank each.
        batch: samples in a step; None: as many as the example inputs have.
        space: what is settled.
        limits: memory and links; links that take no time are measured, unless costs are estimated.
        estimated: from FLOPs and bytes, rather than measured.
        seconds: to measure for, in all.
        backend: how graphs are run.
        rehearse: run a few steps of the best stages, and correct them by that, where this machine
            can run all ranks.

    Raises:
        PlanError: seconds that are none.
    """

    devices: int
    batch: int | None
    space: SearchSpace
    limits: Limits
    estimated: bool = False
    seconds: float = 60.0
    backend: str = "eager"
    rehearse: bool = True

    def __post_init__(self) -> None:
        check_seconds(self.seconds)
