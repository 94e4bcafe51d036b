"""The best stages, microbatches and schedule for a model on some devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tabulate import tabulate

from autosplit.dump import milliseconds
from autosplit.errors import PlanError, ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, unknown_schedule
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.planner.costs import ModelCosts
from autosplit.planner.cuts import CapError, Solution, solve
from autosplit.text.figures import few, size_text

_PER_DEVICE = (1, 2, 4)  # microbatches for each device, where their number is open
_CHUNKS = (2, 3, 4)  # stages a rank, where a schedule leaves that open
_REFINED = 6  # of the best configurations, whose cuts are worked on


class Configuration(NamedTuple):
    """One way to run a model.

    Attributes:
        stages: N.
        size: samples in a microbatch.
        request: the schedule, with M and the ranks.
        found: its stages and the predicted step, or why it cannot run.
    """

    stages: int
    size: int
    request: ScheduleRequest
    found: Solution | PlanError | ScheduleError

    @property
    def key(self) -> tuple[float, float]:
        """What is less is better: seconds of a step, to a hundredth, as no prediction is worth
        more, then bytes of the fullest rank. What cannot run comes last.
        """
        if not isinstance(self.found, Solution):
            return (math.inf, getattr(self.found, "least", math.inf))
        return (round(math.log(self.found.step), 2), max(self.found.peaks))


def search_plans(
    costs_of: Callable[[int], ModelCosts],
    devices: int,
    batch: int,
    *,
    stages: int | None = None,
    microbatches: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    **memory: Any,
) -> list[Configuration]:
    """All configurations, the best first; those that cannot run come last.

    Each gets cuts at even shares; those of the best are then refined, see ``solve``.

    Args:
        costs_of: gives the costs for microbatches of so many samples.
        devices: one rank each.
        batch: samples in a step.
        stages: N; None: one a device, or as many as a schedule wants.
        microbatches: Ms; None: those that divide the batch into about 1, 2 and 4 a device.
        schedules: names; None: all.
        memory: of a rank, and links: ``cap``, ``optimizer_state`` and ``links`` of ``solve``.

    Raises:
        PlanError: a batch that M does not divide, more stages than blocks, or nothing that can run.
        CapError: nothing fits under the cap; says the least cap that would do.
        ScheduleError: an unknown schedule.
    """
    for name in schedules or ():
        if name not in SCHEDULES:
            raise unknown_schedule(name)
    costs = {count: costs_of(batch // count) for count in _counts(devices, batch, microbatches)}

    def solved(count: int, number: int, name: str, *, refine: bool) -> Configuration:
        request = ScheduleRequest(name, count, devices)
        found: Solution | PlanError | ScheduleError
        try:
            found = solve(costs[count], number, request, refine=refine, **memory)
        except (PlanError, ScheduleError) as error:
            found = error
        return Configuration(number, batch // count, request, found)

    choices = [*_choices(schedules, stages, devices)]
    rough = [solved(count, *choice, refine=False) for count in costs for choice in choices]
    rough.sort(key=lambda each: each.key)
    best = [
        solved(each.request.microbatches, each.stages, each.request.name, refine=True)
        for each in rough[:_REFINED]
    ]
    found = sorted([*best, *rough[_REFINED:]], key=lambda each: each.key)
    lost = found[0].found
    if isinstance(lost, CapError):
        raise lost
    if not isinstance(lost, Solution):
        reasons = dict.fromkeys(str(each.found) for each in found)
        raise PlanError("nothing can run: " + "; ".join(reasons))
    return found


def _counts(devices: int, batch: int, microbatches: Sequence[int] | None) -> Sequence[int]:
    """The numbers of microbatches to try."""
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    for count in microbatches or ():
        if count not in divisors:
            raise PlanError(
                f"a batch of {batch} cannot be cut into {count} equal microbatches; "
                f"it can into {few([*map(str, divisors)], 20)}"
            )
    wanted = (each * devices for each in _PER_DEVICE)
    near = (min(divisors, key=lambda d: abs(math.log(d / want))) for want in wanted)
    return sorted({*(microbatches or near)})


def _choices(
    schedules: Sequence[str] | None, stages: int | None, devices: int
) -> Iterator[tuple[int, str]]:
    """Every schedule, with the numbers of stages that it wants."""
    for name in schedules or SCHEDULES:
        chunks = SCHEDULES[name].chunks
        several = _CHUNKS if chunks is None else (chunks,)
        yield from ((n, name) for n in ([stages] if stages else [n * devices for n in several]))


def search_table(found: Sequence[Configuration], rows: int | None = None) -> str:
    """The best ``rows`` configurations that can run; then why others cannot.

    Args:
        found: the best first.
        rows: to show.
    """
    able = [(each, each.found) for each in found if isinstance(each.found, Solution)]
    best = able[0][1].step
    table = [
        [
            each.request.name,
            str(each.stages),
            str(each.request.microbatches),
            str(each.size),
            milliseconds(plan.step),
            f"{plan.step / best:.3f}x",
            f"{plan.bubble:.1%}",
            size_text(round(max(plan.peaks))),
        ]
        for each, plan in able[:rows]
    ]
    headers = ["schedule", "N", "M", "size", "step ms", "of the best", "bubble", "peak"]
    text = tabulate(table, headers, colalign=("left", *["right"] * 7), disable_numparse=True)
    if left_out := len(able) - len(table):
        text += f"\n... and {left_out} more (--rows shows them)"
    lost = [each for each in found if not isinstance(each.found, Solution)]
    reasons = "\n".join(dict.fromkeys(f"not {each.request.name}: {each.found}" for each in lost))
    return f"{text}\n\n{reasons}" if reasons else text
