"""The best stages, microbatches and schedule for a model on some devices, and why others lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from autosplit.dump.tables import milliseconds
from autosplit.errors import PlanError, ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, unknown_schedule
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.planner.costs import ModelCosts
from autosplit.planner.cuts import CapError, Limits, Solution, solve
from autosplit.text.figures import few, size_text

NEAR = 0.01
"""Of the shortest step: by less than this, no plan is known to be better than another."""

_PER_DEVICE = (1, 2, 4)  # microbatches for each device, where their number is open
_CHUNKS = (2, 3, 4)  # stages a rank, where a schedule leaves that open
_REFINED = 6  # of the best configurations, whose cuts are worked on
_MOST = 1_000_000_000  # of anything: beyond, it is a slip of the pen


@dataclass(frozen=True)
class Configuration:
    """One way to run a model.

    Attributes:
        stages: N.
        size: samples in a microbatch.
        request: the schedule, with M and the ranks.
        solution: its stages and the predicted step; None where it cannot run.
        least: bytes a rank that it would need, where that is over the cap.
        lost: why it is not the best; empty for the best.
    """

    stages: int
    size: int
    request: ScheduleRequest
    solution: Solution | None = None
    least: float = math.inf
    lost: str = ""

    @property
    def key(self) -> tuple[float, float]:
        """Seconds of a step, then bytes of the fullest rank; what cannot run comes last."""
        found = self.solution
        return (math.inf, self.least) if found is None else (found.step, max(found.peaks))

    def filled(self, costs: ModelCosts, limits: Limits, *, refine: bool) -> Configuration:
        """The same with its stages, or with why it has none."""
        try:
            found = solve(costs, self.stages, self.request, limits=limits, refine=refine)
        except CapError as error:
            over, needs = map(math.ceil, (error.least - limits.cap, error.least))
            lost = f"over the cap by {size_text(over)}: needs {size_text(needs)} a rank"
            return replace(self, least=error.least, lost=lost)
        except (PlanError, ScheduleError) as error:
            return replace(self, lost=str(error))
        return replace(self, solution=found)


def search_plans(
    costs_of: Callable[[int], ModelCosts],
    devices: int,
    batch: int,
    *,
    stages: int | None = None,
    microbatches: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    limits: Limits | None = None,
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
        limits: memory of a rank and links; None: as much as is needed, and transfers take no time.

    Raises:
        PlanError: a batch that M does not divide, more stages than blocks, or nothing that can run.
        CapError: nothing fits under the cap; says the least cap that would do.
        ScheduleError: an unknown schedule.
    """
    limits = limits or Limits()
    for name in schedules or ():
        if name not in SCHEDULES:
            raise unknown_schedule(name)
    counts = _microbatches(devices, batch, stages, microbatches)
    costs = {count: costs_of(batch // count) for count in counts}
    blocks = len(costs[counts[0]].blocks)
    if stages is not None and stages > blocks:
        raise PlanError(f"{stages} stages are more than the model has blocks, {blocks}")
    found = [
        Configuration(
            each, batch // count, ScheduleRequest(name, count, devices, split_backward=split)
        ).filled(costs[count], limits, refine=False)
        for count in counts
        for name, each, split in _choices(schedules, stages, devices)
    ]
    found.sort(key=lambda each: each.key)
    best = [
        each.filled(costs[each.request.microbatches], limits, refine=True)
        for each in found[:_REFINED]
        if each.solution is not None
    ]
    return ranked([*best, *found[len(best) :]])


def _microbatches(
    devices: int, batch: int, stages: int | None, microbatches: Sequence[int] | None
) -> list[int]:
    """The numbers of microbatches to try.

    Raises:
        PlanError: a count of anything that cannot be.
    """
    for what, value in (("devices", devices), ("batch", batch), ("stages", stages)):
        if value is not None and not 1 <= value <= _MOST:
            raise PlanError(f"{what} must be from 1 to {_MOST:,}, got {value:,}")
    small = [count for count in range(1, math.isqrt(batch) + 1) if batch % count == 0]
    divisors = sorted({*small, *(batch // count for count in small)})
    if microbatches is None:
        wanted = (each * devices for each in _PER_DEVICE)
        return sorted({min(divisors, key=lambda d: abs(math.log(d / want))) for want in wanted})
    for count in microbatches:
        if count not in divisors:
            raise PlanError(
                f"a batch of {batch} cannot be cut into {count} equal microbatches; "
                f"it can into {few([*map(str, divisors)], 20)}"
            )
    return sorted(set(microbatches))


def _choices(
    schedules: Sequence[str] | None, stages: int | None, devices: int
) -> Iterator[tuple[str, int, bool]]:
    """Every schedule, with the stages that it wants, split and, if it can be, fused."""
    for name in schedules or SCHEDULES:
        family = SCHEDULES[name]
        chunks = _CHUNKS if family.chunks is None else (family.chunks,)
        counts = (stages,) if stages else tuple(each * devices for each in chunks)
        yield from itertools.product([name], counts, (True, False)[: 1 + family.fused])


def ranked(found: Sequence[Configuration]) -> list[Configuration]:
    """The best first, each with why it lost: of those whose steps are within a hundredth of the
    shortest, which is less than a prediction is worth, the one that holds least.

    Raises:
        CapError: none fits under the cap; says the least cap that would do.
        PlanError: none can run.
    """
    ordered = sorted(found, key=lambda each: each.key)
    shortest, least = ordered[0].key
    if not math.isinf(least) and math.isinf(shortest):
        raise CapError(
            f"nothing fits: the least cap is {size_text(math.ceil(least))} a rank ({least:,.0f} "
            f"bytes), with {ordered[0].request.name} and {ordered[0].request.microbatches} "
            f"microbatches of {ordered[0].size}, {ordered[0].stages} stages: raise the cap, use "
            "more devices, smaller microbatches or another memory setting, or give the limit to a "
            "trainer alone, which may move or make again what is too much",
            least,
        )
    if math.isinf(shortest):
        raise PlanError("nothing can run: " + "; ".join(dict.fromkeys(e.lost for e in ordered)))
    near = (each for each in ordered if each.key[0] <= (1.0 + NEAR) * shortest)
    first = min(near, key=lambda each: each.key[::-1])
    others = (each for each in ordered if each is not first)
    return [first, *(replace(each, lost=each.lost or _reason(each, first)) for each in others)]


def _reason(one: Configuration, best: Configuration) -> str:
    slower = one.key[0] / best.key[0] - 1.0
    if slower >= 0.0005:
        return f"slower by {slower:.1%}"
    lost, more = "as fast", one.key[1] - best.key[1]
    if slower <= -0.0005:
        lost = f"faster by {-slower:.1%}"
    return f"{lost}, but holds {size_text(math.ceil(more))} more" if more > 0 else lost


def search_table(found: Sequence[Configuration], rows: int | None = None) -> str:
    """The best ``rows`` configurations that can run, each beside the best; then why others cannot.

    Args:
        found: the best first.
        rows: to show.
    """
    able = [each for each in found if each.solution is not None]
    table = [[*_cells(each), each.lost or "the best"] for each in able[:rows]]
    headers = ["schedule", "backward", "N", "M", "size", "step ms", "bubble", "peak", ""]
    align = ("left", "left", *["right"] * 6, "left")
    text = tabulate(table, headers, colalign=align, disable_numparse=True)
    if left_out := len(able) - len(table):
        text += f"\n... and {left_out} more, none faster (--rows shows them)"
    lost = (f"not {e.request.name} N={e.stages}: {e.lost}" for e in found if e.solution is None)
    reasons = "\n".join(dict.fromkeys(lost))
    return f"{text}\n\n{reasons}" if reasons else text


def _cells(one: Configuration) -> list[str]:
    found, request = one.solution, one.request
    if found is None:
        return []
    return [
        request.name,
        "split" if request.split_backward else "fused",
        str(one.stages),
        str(request.microbatches),
        str(one.size),
        milliseconds(found.step),
        f"{found.bubble:.1%}",
        size_text(round(max(found.peaks))),
    ]
