"""Automatic cuts against cuts by hand, on two real ranks, and the plan against what it measures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from autosplit.mesh.costs import device_of_group, measure_device
from autosplit.pipeline.builders.build import ScheduleRequest
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import ModelCosts, estimate, kinds, profile
from autosplit.planner.cuts import Solution, solve
from autosplit.planner.cutting import on_all_ranks
from autosplit.ranks.groups import Groups
from autosplit.ranks.launch import launch

from ..links import measure_transfer, ring
from ..page import option
from ..pipeline.turns import gather, take_turns
from .models import CASES
from .training import WARM_UP, Training

STAGES = 2
MICROBATCHES = 4
SCHEDULE = "1f1b"
REQUEST = ScheduleRequest(SCHEDULE, MICROBATCHES)

_LEAST = 5  # training steps
_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True)
class Amount:
    """How much to measure."""

    steps: int = option(20, "timed steps of each of two ways to cut")
    seconds: float = option(12.0, "of profiling, for each model")
    training: float = 6.0  # seconds of it, if they are enough for a few steps
    tiny: bool = option(False, "tiny models: only that it works")


def measure(amount: Amount, names: Sequence[str] = tuple(CASES)) -> Iterator[dict[str, Any]]:
    """One row for each model, as soon as it is measured."""
    for name in names:
        yield launch(_compare, STAGES, (name, amount), timeout=_TIMEOUT, threads=1)[0]


def _compare(case: str, amount: Amount) -> dict[str, Any]:
    """What every rank does; the row is the same on all."""
    subject = CASES[case].subject(tiny=amount.tiny)
    model = subject.build()
    names = subject.cut_by_hand(STAGES)
    whole, by_hand = WholeModel.capture(model, subject.example()).divided(names)
    costs = on_all_ranks(lambda: profile(whole, seconds=amount.seconds))
    planner = _Planner(whole, costs, _links())
    plans = {"automatic": planner.automatic(), "by hand": planner.given(by_hand)}
    if plans["automatic"].firsts == tuple(by_hand):
        del plans["by hand"]
    guess = estimate(whole, device=gather(measure_device())[0])
    guessed = solve(guess, STAGES, REQUEST).firsts
    rows = {}
    with ExitStack() as stack:
        trained = {way: Training(subject, whole, plan, MICROBATCHES) for way, plan in plans.items()}
        for training in trained.values():
            stack.enter_context(training.trainer)
        for way, training in trained.items():
            plan = plans[way]
            steps = max(_LEAST, math.ceil(amount.training / plan.step))
            rows[way] = {
                "profiled": plan.step,
                "profiled_times": plan.costs.times,
                "cuts": training.cuts,
                **training.measured(steps),
            }
        turns = {way: training.step for way, training in trained.items()}
        several = len(turns) > 1
        alternating = take_turns(turns, amount.steps, WARM_UP) if several else None
    return {
        "name": case,
        "blocks": len(whole.blocks),
        "kinds": len(kinds(whole)),
        **planner.most_even(plans["automatic"]),
        "estimated": [whole.blocks[index].name for index in guessed],
        "alternating": alternating,
        **rows,
    }


@dataclasses.dataclass(frozen=True)
class _Planner:
    """What ``autosplit.partition`` does, with what it passes over on the way."""

    whole: WholeModel
    costs: ModelCosts
    links: Transfer

    def automatic(self) -> Solution:
        return solve(self.costs, STAGES, REQUEST, links=self.links)

    def given(self, firsts: list[int]) -> Solution:
        return solve(self.costs, STAGES, REQUEST, links=self.links, firsts=firsts)

    def most_even(self, plan: Solution) -> dict[str, float]:
        """The least that the slowest of two stages takes over the mean of both, for any cut, and
        that cut's predicted step over that of the plan's own, by the same costs.
        """
        ways = [self.given([first]) for first in range(1, len(self.whole.blocks))]
        even = min(ways, key=_uneven)
        return {"even": _uneven(even), "even_step": even.step / plan.step}


def _uneven(found: Solution) -> float:
    """Seconds of the slowest stage over those of the mean stage."""
    seconds = [*map(sum, found.costs.times)]
    return max(seconds) * len(seconds) / sum(seconds)


def _links() -> Transfer:
    """The links between the ranks, measured with the messages that a trainer's stages send."""
    groups = Groups(STAGES, device_of_group(), _TIMEOUT)
    try:
        return measure_transfer(groups, device_of_group(), ring(STAGES))
    finally:
        groups.destroy()
