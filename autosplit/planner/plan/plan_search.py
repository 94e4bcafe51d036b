"""The best stages, microbatches, schedule and memory setting for a model on some devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autosplit.errors import PlanError, ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.builders.schedule_request import AUTO, ScheduleRequest
from autosplit.pipeline.search.search import search as search_schedule
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.costs.limits import Limits
from autosplit.planner.cuts.solve import CapError, bound, solve
from autosplit.planner.cuts.within_limit import within_limit
from autosplit.text.figures import few, size_text

from .alternatives import NEAR, Configuration, ranked

CostsOf = Callable[[int, str | int], ModelCosts]
"""The costs of the model for microbatches of so many samples under a memory setting."""

MEMORY = ("balanced", "fast", "lean")
_PER_DEVICE = (1, 2, 4)  # microbatches for each device, where their number is open
_CHUNKS = (2, 3, 4)  # stages a rank, where a schedule leaves that open
_REFINED = 6  # of the best configurations, whose cuts are worked on
_MOST = 1_000_000_000  # of anything: beyond, it is a slip of the pen
_FEW = 500  # microbatches times stages: such a step is played sooner than it would be missed
_SEARCHED = 2  # of these, for which a schedule of their own is searched


@dataclass(frozen=True)
class SearchSpace:
    """What a search may choose from; None leaves a choice open.

    Attributes:
        stages: N, else one a device, or as many as a schedule wants.
        microbatches: Ms, else those that divide the batch into about 1, 2 and 4 a device.
        schedules: names, else all and ``"auto"``.
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

    Each gets the cuts that dynamic programming gives; the best are then refined, see ``solve``,
    and the best of these get a schedule searched for them.

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
    _check(space, devices, batch)
    blanks: list[Configuration] = []
    for memory, count in itertools.product(
        space.memory or MEMORY, _microbatches(space, devices, batch)
    ):
        costs = costs_of(batch // count, memory)
        if space.stages is not None and space.stages > len(costs.blocks):
            raise PlanError(
                f"{space.stages} stages are more than the model has blocks, {len(costs.blocks)}"
            )
        for form in _schedule_choices(space, devices):
            blanks.append(
                Configuration(
                    form.stages, devices, count, batch // count, form.schedule, form.fused, memory
                )
            )
    return ranked(_refined(_cut(blanks, costs_of, limits), costs_of, limits, space))


def _cut(blanks: Sequence[Configuration], costs_of: CostsOf, limits: Limits) -> list[Configuration]:
    """All with their stages, or with why they have none: of those whose steps have many actions,
    the ones that cannot be the best are left out.
    """
    bounds = [
        _bound(each, costs_of(each.microbatch_size, each.memory))
        if each.stages * each.microbatches > _FEW
        else 0.0
        for each in blanks
    ]
    found: dict[int, Configuration] = {}
    known: dict[tuple[ModelCosts, ScheduleRequest, int], Configuration] = {}
    shortest = math.inf
    for at in sorted(range(len(blanks)), key=lambda at: (bounds[at], -at)):
        each = blanks[at]
        if bounds[at] > shortest * (1.0 + NEAR):
            found[at] = replace(each, lost="slower wherever the model is cut")
            continue
        costs = costs_of(each.microbatch_size, each.memory)
        alike = costs, _request(each), each.stages  # memory settings may come to the same
        if alike not in known:
            known[alike] = _filled(each, costs, limits, refine=False, rival=shortest)
        found[at] = replace(known[alike], memory=each.memory)
        shortest = min(shortest, found[at].key[0])
    return [found[at] for at in range(len(blanks))]


def _bound(blank: Configuration, costs: ModelCosts) -> float:
    """Seconds below which no step of a configuration can be; 0 where it has none."""
    try:
        return bound(costs, blank.stages, _request(blank))
    except PlanError:
        return 0.0


def _request(blank: Configuration) -> ScheduleRequest:
    return ScheduleRequest(
        blank.schedule, blank.microbatches, blank.ranks, split_backward=not blank.fused
    )


@dataclass(frozen=True)
class _ScheduleChoice:
    schedule: str
    stages: int
    fused: bool


def _filled(
    blank: Configuration,
    costs: ModelCosts,
    limits: Limits,
    *,
    refine: bool,
    rival: float = math.inf,
) -> Configuration:
    """The configuration with its stages, or with why it has none."""
    try:
        solution = solve(
            costs,
            blank.stages,
            _request(blank),
            limits=limits,
            refine=refine,
            rival=rival,
        )
    except CapError as error:
        over, needs = map(math.ceil, (error.least - limits.cap, error.least))
        return replace(
            blank,
            least=error.least,
            lost=f"over the cap by {size_text(over)}: needs {size_text(needs)} a rank",
        )
    except (PlanError, ScheduleError) as error:
        return replace(blank, lost=str(error))
    return replace(blank, solution=solution)


def _with_measures(
    found: list[Configuration], costs_of: CostsOf, limits: Limits
) -> list[Configuration]:
    """Of configurations that are over the cap those that would be shortest, kept under it by
    measures of memory where that can be.
    """
    over = [each for each in found if each.least is not None and not each.fused]
    if not limits.measures or not over:
        return found
    roomy = replace(limits, cap=math.inf)
    free = {
        at: _filled(each, costs_of(each.microbatch_size, each.memory), roomy, refine=False)
        for at, each in enumerate(found)
        if each in over
    }
    kept = [*found]
    for at in sorted(free, key=lambda at: free[at].key)[:_SEARCHED]:
        solution = free[at].solution
        if solution is None:
            continue
        try:
            kept[at] = replace(
                free[at], solution=within_limit(solution, limits), least=None, lost=""
            )
        except CapError as error:
            kept[at] = replace(found[at], least=error.least)
    return kept


def _searched(one: Configuration, limits: Limits) -> Configuration | None:
    """The same stages under a schedule of their own, if one is found."""
    solution = one.solution
    if solution is None:
        return None
    still = [0.0] * one.ranks
    for stage, rank in enumerate(solution.schedule.placement):
        still[rank] += limits.factor * solution.parameters[stage]
    try:
        schedule = search_schedule(
            solution.costs,
            one.microbatches,
            ranks=one.ranks,
            placement=solution.schedule.placement,
            cap=[max(limits.cap - each, 1.0) for each in still],
        )
    except ScheduleError:
        return None
    timeline = simulate(schedule, solution.costs.seconds, transfer=solution.costs.transfer)
    moving = peak_memory(schedule, solution.costs.memory)
    better = replace(
        solution,
        schedule=schedule,
        step=timeline.makespan,
        bubble=max(0.0, timeline.bubble_ratio()),
        peaks=tuple(map(sum, zip(moving, still, strict=True))),
    )
    return replace(one, schedule=AUTO, fused=False, solution=better)


def _check(space: SearchSpace, devices: int, batch: int) -> None:
    for what, value in (("devices", devices), ("batch", batch), ("stages", space.stages)):
        if value is not None and value < 1:
            raise PlanError(f"{what} must be at least 1, got {value}")
        if value is not None and value > _MOST:
            raise PlanError(f"{what} must be at most {_MOST:,}, got {value:,}")
    for name in space.schedules or ():
        if name not in SCHEDULES and name != AUTO:
            raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}, {AUTO}")
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


def microbatch_sizes(space: SearchSpace, devices: int, batch: int) -> list[int]:
    """For microbatches of how many samples a search asks the costs, in this order."""
    _check(space, devices, batch)
    return [batch // count for count in _microbatches(space, devices, batch)]


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


def _schedule_choices(space: SearchSpace, devices: int) -> Iterator[_ScheduleChoice]:
    """Every schedule, with the stages that it wants, split and, if it can be, fused."""
    names = space.schedules or tuple(SCHEDULES)
    # What a schedule of their own is searched for must come from somewhere.
    named = [name for name in names if name != AUTO] or ["1f1b", "zb-v"]
    for name in named:
        family = SCHEDULES[name]
        chunks = _CHUNKS if family.chunks is None else (family.chunks,)
        counts = (space.stages,) if space.stages else tuple(each * devices for each in chunks)
        for stages in counts:
            yield from (
                _ScheduleChoice(name, stages, fused) for fused in (False, True)[: 1 + family.fused]
            )


def _refined(
    found: list[Configuration], costs_of: CostsOf, limits: Limits, space: SearchSpace
) -> list[Configuration]:
    """The best ones worked on, and their like with a schedule of their own."""
    ordered = sorted((each for each in found if each.solution), key=lambda each: each.key)
    rest = [each for each in found if each not in ordered[:_REFINED]]
    best = [
        _filled(
            replace(each, solution=None),
            costs_of(each.microbatch_size, each.memory),
            limits,
            refine=True,
        )
        for each in ordered[:_REFINED]
    ]
    rest = _with_measures(rest, costs_of, limits)
    names = space.schedules
    if names is not None and AUTO not in names:
        return best + rest
    own = [_searched(each, limits) for each in sorted(best, key=lambda each: each.key)[:_SEARCHED]]
    made = [each for each in own if each is not None]
    if names is not None and set(names) == {AUTO} and made:
        return made
    return best + rest + made
