"""The shortest step within a limit of memory, by all measures together.

Where weight gradients go, what is kept at a partner, what in the host's store, what is made again,
and how much the split itself saves: each costs time in another place, so they are chosen on one
simulated step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import ROUNDING
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.text.figures import few

from .limit_findings import WithinMemory
from .limit_search import LimitSearch
from .measures import MEASURES
from .search import caps_of


class LimitError(ScheduleError):
    """Nothing was found within a limit.

    Attributes:
        least: the least limit that something was found for; infinite if nothing was.
        bound: what no schedule can do with less than.
        schedule: what keeps ``least``.
    """

    # Defaults, because an error on its way to another process is made from its message alone.
    def __init__(
        self,
        message: str,
        least: float = math.inf,
        bound: float = 0.0,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(message)
        self.least = least
        self.bound = bound
        self.schedule = schedule


def search_within(
    costs: Costs | Mapping[str | int, Costs],
    microbatches: int,
    limit: float | Sequence[float],
    *,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    fixed: Sequence[float] = (),
    measures: Sequence[str] = tuple(MEASURES),
) -> WithinMemory:
    """The shortest step that was found in which no rank holds more than a limit; deterministic.

    What a rank holds is counted by the order of its row (``peak_memory``), which the engine keeps
    whatever transfers take. The step is never longer than the shortest that any single measure
    gives on a named schedule or on one that ``search`` finds. How much is simulated is bounded.

    Args:
        costs: of every stage; or by memory setting of the split, of which the best is taken.
        microbatches: M >= 1.
        limit: bytes that a rank may hold: one number, or one for each rank.
        ranks: number of processes; None means one for each stage.
        placement: the rank of every stage, where that is settled.
        fixed: per rank, bytes of parameters, gradients and optimizer state, which count towards
            the limit; none where the limit is of activations only.
        measures: of ``MEASURES``, those that may be taken.

    Raises:
        LimitError: a limit below what is fixed, or one that no measures keep; says the least for
            which something was found, what nothing can do with less than, and what dominates there.
        ScheduleError: an unknown measure, or a bad count.
    """
    unknown = [measure for measure in measures if measure not in MEASURES]
    if unknown:
        raise ScheduleError(f"unknown measure {unknown[0]!r}; known: {few(list(MEASURES), 9)}")
    settings = {"saved": costs} if isinstance(costs, Costs) else dict(costs)
    count = ranks or len(next(iter(settings.values())).times)
    limits = caps_of(limit, count)
    rests = [*fixed] if fixed else [0.0] * count
    if len(rests) != count:
        raise ScheduleError(f"expected what is fixed on each of {count} ranks, got {len(rests)}")
    caps = [most - rest for most, rest in zip(limits, rests, strict=True)]
    found: list[WithinMemory] = []
    nearest: list[tuple[float, str, Schedule]] = []
    unlimited, simulated, bounds = math.inf, 0, []
    for setting, each in settings.items():
        one = LimitSearch(each, microbatches, count, placement, caps, measures, setting)
        bounds.append(one.bound)
        if max(one.bound) <= 0.0:  # no rank but has room for what every schedule needs
            unlimited = min(unlimited, one.unlimited)
            best = one.run()
            found += [] if best is None else [best]
        nearest.append(one.frugal())
        simulated += one.simulated
    if not found:
        raise _refusal(limits, rests, bounds, nearest)
    best = min(found, key=lambda each: each.timeline.step_time)
    return replace(best, unlimited=unlimited, simulated=simulated)


def _refusal(
    limits: Sequence[float],
    rests: Sequence[float],
    bounds: Sequence[Sequence[float]],
    nearest: Sequence[tuple[float, str, Schedule]],
) -> LimitError:
    """What is said of a limit that nothing keeps.

    Args:
        limits: by rank.
        rests: by rank, what is fixed.
        bounds: by setting and rank, by how much what every schedule holds exceeds the limit.
        nearest: by setting, by how much what comes nearest to the limit exceeds it.
    """
    over = min(bounds, key=max)
    rank = over.index(max(over))
    bound, rest = limits[rank] + over[rank], rests[rank]
    excess, what, schedule = min(nearest, key=lambda each: each[0])
    least = max(limits) + excess
    dominates, advice = "activations", "cut the batch into more and smaller microbatches"
    if rest > bound - rest:
        dominates = "parameters, gradients and optimizer state"
        advice = "use more ranks, or an optimizer that keeps less"
    less = "" if least <= bound * ROUNDING else f" than {bound:,.0f}"
    return LimitError(
        f"no schedule within a limit of {min(limits):,.0f} was found: the least that was needs "
        f"{least:,.0f} ({what}), and none can do with less{less}. Rank {rank} holds {rest:,.0f} of "
        f"parameters, gradients and optimizer state, and at least {bound - rest:,.0f} of one "
        f"microbatch: {dominates} dominate. Use a limit of {math.ceil(least):,}, or {advice}",
        least,
        bound,
        schedule,
    )
