"""The best stages, microbatches, schedule and memory setting for a model on some devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autosplit.errors import PlanError, ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, unknown_schedule
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.planner.costs import Limits, ModelCosts
from autosplit.planner.cuts import CapError, Solution, solve
from autosplit.text.figures import few, size_text

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
        schedule: a key of ``pipeline.SCHEDULES``.
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
            f"{first.memory!r}: raise the cap, use more devices or smaller microbatches, or give "
            "the limit to a trainer alone, which may move or make again what is too much",
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
    lost = f"faster by {-slower:.1%}" if slower <= -0.0005 else "as fast"
    if more > 0 or slower <= -0.0005:
        lost += f", but holds {size_text(math.ceil(more))} more"
    return replace(one, lost=lost)


CostsOf = Callable[[int, str | int], ModelCosts]
"""The costs of the model for microbatches of so many samples under a memory setting."""

MEMORY = ("balanced", "fast", "lean")
_PER_DEVICE = (1, 2, 4)  # microbatches for each device, where their number is open
_CHUNKS = (2, 3, 4)  # stages a rank, where a schedule leaves that open
_REFINED = 6  # of the best configurations, whose cuts are worked on
_MOST = 1_000_000_000  # of anything: beyond, it is a slip of the pen


@dataclass(frozen=True)
class SearchSpace:
    """What a search may choose from; None leaves a choice open.

    Attributes:
        stages: N, else one a device, or as many as a schedule wants.
        microbatches: Ms, else those that divide the batch into about 1, 2 and 4 a device.
        schedules: names, else all.
        memory: memory settings, else all.
    """

    stages: int | None = None
    microbatches: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    memory: Sequence[str] | None = None


def search_plans(
    costs_of: CostsOf,
    devices: int,
    batch: int,
    *,
    space: SearchSpace | None = None,
    limits: Limits | None = None,
) -> list[Configuration]:
    """All configurations, the shortest predicted step first; those that cannot run come last.

    Each gets the cuts that dynamic programming gives; the best are then refined, see ``solve``.

    Args:
        costs_of: gives the costs; asked once for each size and setting.
        devices: one rank each.
        batch: samples in a step.
        space: what is settled.
        limits: memory of a rank and links; None: as much as is needed, and transfers take no time.

    Raises:
        PlanError: a batch that M does not divide, more stages than blocks, an unknown memory
            setting, or nothing that can run.
        CapError: nothing fits under the cap; says the least cap that would do.
        ScheduleError: an unknown schedule.
    """
    space = space or SearchSpace()
    limits = limits or Limits()
    found = [
        _filled(blank, costs_of, limits, refine=False)
        for blank in _blanks(costs_of, devices, batch, space)
    ]
    best = sorted((each for each in found if each.solution), key=lambda each: each.key)[:_REFINED]
    rest = [each for each in found if each not in best]
    best = [_filled(replace(each, solution=None), costs_of, limits, refine=True) for each in best]
    return ranked([*best, *rest])


def _blanks(
    costs_of: CostsOf, devices: int, batch: int, space: SearchSpace
) -> Iterator[Configuration]:
    """All configurations, without their stages."""
    _check(space, devices, batch)
    for memory, count in itertools.product(
        space.memory or MEMORY, _microbatches(space, devices, batch)
    ):
        blocks = len(costs_of(batch // count, memory).blocks)
        if space.stages is not None and space.stages > blocks:
            raise PlanError(f"{space.stages} stages are more than the model has blocks, {blocks}")
        for schedule, stages, fused in _schedule_choices(space, devices):
            yield Configuration(stages, devices, count, batch // count, schedule, fused, memory)


def _filled(
    blank: Configuration, costs_of: CostsOf, limits: Limits, *, refine: bool
) -> Configuration:
    """The configuration with its stages, or with why it has none."""
    costs = costs_of(blank.microbatch_size, blank.memory)
    request = ScheduleRequest(
        blank.schedule, blank.microbatches, blank.ranks, split_backward=not blank.fused
    )
    try:
        solution = solve(costs, blank.stages, request, limits=limits, refine=refine)
    except CapError as error:
        over, needs = map(math.ceil, (error.least - limits.cap, error.least))
        lost = f"over the cap by {size_text(over)}: needs {size_text(needs)} a rank"
        return replace(blank, least=error.least, lost=lost)
    except (PlanError, ScheduleError) as error:
        return replace(blank, lost=str(error))
    return replace(blank, solution=solution)


def _check(space: SearchSpace, devices: int, batch: int) -> None:
    for what, value in (("devices", devices), ("batch", batch), ("stages", space.stages)):
        if value is not None and value < 1:
            raise PlanError(f"{what} must be at least 1, got {value}")
        if value is not None and value > _MOST:
            raise PlanError(f"{what} must be at most {_MOST:,}, got {value:,}")
    for name in space.schedules or ():
        if name not in SCHEDULES:
            raise unknown_schedule(name)
    for setting in space.memory or ():
        if setting not in MEMORY:
            raise PlanError(f"unknown memory setting {setting!r}; known: {', '.join(MEMORY)}")
    for count in space.microbatches or ():
        if count < 1 or batch % count:
            may = few([*map(str, _divisors(batch))], 20)
            raise PlanError(
                f"a batch of {batch} cannot be cut into {count} equal microbatches; "
                f"it can into {may}"
            )


def count_settings(space: SearchSpace, devices: int, batch: int) -> int:
    """For how many pairs of a size and a memory setting a search asks the costs."""
    _check(space, devices, batch)
    return len(space.memory or MEMORY) * len(_microbatches(space, devices, batch))


def _divisors(batch: int) -> list[int]:
    small = [count for count in range(1, math.isqrt(batch) + 1) if batch % count == 0]
    return sorted({*small, *(batch // count for count in small)})


def _microbatches(space: SearchSpace, devices: int, batch: int) -> list[int]:
    """The numbers of microbatches to try."""
    if space.microbatches is not None:
        return sorted(set(space.microbatches))
    wanted = (each * devices for each in _PER_DEVICE)
    divisors = _divisors(batch)
    return sorted({min(divisors, key=lambda d: abs(math.log(d / want))) for want in wanted})


def _schedule_choices(space: SearchSpace, devices: int) -> Iterator[tuple[str, int, bool]]:
    """Every schedule, with the stages that it wants, split and, if it can be, fused."""
    for name in space.schedules or tuple(SCHEDULES):
        family = SCHEDULES[name]
        chunks = _CHUNKS if family.chunks is None else (family.chunks,)
        counts = (space.stages,) if space.stages else tuple(each * devices for each in chunks)
        yield from itertools.product([name], counts, (False, True)[: 1 + family.fused])
