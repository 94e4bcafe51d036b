"""Search for the best stages, microbatches, schedule and cuts of a model on a number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from autosplit.errors import PlanError, ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, ScheduleRequest, unknown_schedule
from autosplit.planner.costs import ModelCosts
from autosplit.planner.cuts import CapError, Solution, solve
from autosplit.text.figures import few

_PER_DEVICE = (1, 2, 4)  # microbatches per device to try
_CHUNKS = (2, 3, 4)  # stages per rank to try, for schedules with any number
_REFINED = 6  # the number of best configurations whose cuts are refined


class Configuration(NamedTuple):
    """One way to run a model: stages, size of a microbatch and schedule.

    Attributes:
        stages: the number of stages.
        size: the number of samples in a microbatch.
        request: the requested schedule, with the numbers of microbatches and ranks.
        outcome: the cuts and the predicted step, or the error because of which it cannot run.
    """

    stages: int
    size: int
    request: ScheduleRequest
    outcome: Solution | PlanError | ScheduleError

    @property
    def key(self) -> tuple[float, float]:
        """Sort key, the best first: the seconds of a step, then the bytes on the fullest rank.

        Seconds that differ by less than about 1 % count as equal, because predictions are not more
        precise. Configurations that cannot run come last.
        """
        if not isinstance(self.outcome, Solution):
            return (math.inf, getattr(self.outcome, "least", math.inf))
        return (round(math.log(self.outcome.step), 2), max(self.outcome.peaks))


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
    """Return all configurations, the best first. Configurations that cannot run come last.

    Each configuration first gets even cuts. The cuts of the best configurations are then refined,
    see ``solve``.

    Args:
        costs_of: a function from the number of samples in a microbatch to the costs of blocks.
        devices: number of devices; each has one rank.
        batch: number of samples in a step.
        stages: number of stages N; None: one per device, or as many as a schedule needs.
        microbatches: numbers of microbatches M to try; None: divisors of the batch near 1, 2 and 4
            per device.
        schedules: names of schedules to try; None: all.
        memory: the memory of a rank, and links: ``cap``, ``optimizer_state``, ``links`` and
            ``copies`` of ``solve``.

    Raises:
        PlanError: M does not divide the batch, there are more stages than blocks, or no
            configuration can run.
        CapError: no configuration fits under the cap; names the smallest cap under which one fits.
        ScheduleError: an unknown schedule.
    """
    for name in schedules or ():
        if name not in SCHEDULES:
            raise unknown_schedule(name)
    costs = {count: costs_of(batch // count) for count in _counts(devices, batch, microbatches)}

    def solved(count: int, number: int, name: str, *, refine: bool) -> Configuration:
        request = ScheduleRequest(name, count, devices)
        outcome: Solution | PlanError | ScheduleError
        try:
            outcome = solve(costs[count], number, request, refine=refine, **memory)
        except (PlanError, ScheduleError) as error:
            outcome = error
        return Configuration(number, batch // count, request, outcome)

    choices = [*_choices(schedules, stages, devices)]
    unrefined = [solved(count, *choice, refine=False) for count in costs for choice in choices]
    unrefined.sort(key=lambda configuration: configuration.key)
    best = [
        solved(
            configuration.request.microbatches,
            configuration.stages,
            configuration.request.name,
            refine=True,
        )
        for configuration in unrefined[:_REFINED]
    ]
    everything = [*best, *unrefined[_REFINED:]]
    configurations = sorted(everything, key=lambda configuration: configuration.key)
    outcome = configurations[0].outcome
    if isinstance(outcome, CapError):
        raise outcome
    if not isinstance(outcome, Solution):
        reasons = dict.fromkeys(str(configuration.outcome) for configuration in configurations)
        raise PlanError("no configuration can run: " + "; ".join(reasons))
    return configurations


def _counts(devices: int, batch: int, microbatches: Sequence[int] | None) -> Sequence[int]:
    """The numbers of microbatches to try."""
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    for count in microbatches or ():
        if count not in divisors:
            raise PlanError(
                f"a batch of {batch} cannot be cut into {count} equal microbatches; "
                f"possible counts: {few([*map(str, divisors)], 20)}"
            )
    wanted = (factor * devices for factor in _PER_DEVICE)
    near = (min(divisors, key=lambda d: abs(math.log(d / want))) for want in wanted)
    return sorted({*(microbatches or near)})


def _choices(
    schedules: Sequence[str] | None, stages: int | None, devices: int
) -> Iterator[tuple[int, str]]:
    """Yield (number of stages, schedule) for every schedule and each number of stages that it can
    have.
    """
    for name in schedules or SCHEDULES:
        chunks = SCHEDULES[name].chunks
        several = _CHUNKS if chunks is None else (chunks,)
        yield from ((n, name) for n in ([stages] if stages else [n * devices for n in several]))
