"""``schedule="auto"``: search the shortest step for measured costs under a cap of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule, check_counts, check_size
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.playing import replay
from autosplit.pipeline.simulation.simulate import Costs

from .local_search import improve
from .problem import PlayedOrder, Problem
from .starts import construct, named_schedules

_WORK = 600_000  # actions of all orders that are tried: a second

Problems = Mapping[tuple[int, ...], Problem]
"""By placement."""


def search(
    costs: Costs,
    microbatches: int,
    *,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    cap: float | Sequence[float] = math.inf,
    work: int = _WORK,
) -> Schedule:
    """The schedule with the shortest step that was found; deterministic.

    Of every named schedule that the counts admit, and of list scheduling on their placements, all
    under the cap, it changes the best. So it is never worse than the best named schedule under the
    same cap, with the links and the wiring that ``costs`` tell of.

    Args:
        costs: of every stage, and how the trainer runs them.
        microbatches: M >= 1.
        ranks: number of processes; None means one for each stage.
        placement: the rank of every stage, where that is settled; None leaves it to the search,
            among the placements of the named schedules.
        cap: the most a rank may keep of its microbatches, in the unit of ``costs.memory``: one
            number, or one for each rank.
        work: actions of all orders that are tried.

    Returns:
        A schedule named ``"auto"``. Ranks wait for each other between steps.

    Raises:
        ScheduleError: a bad count, a step of more than ``schedule.LARGEST`` actions, or nothing
            found under the cap.
    """
    stages = len(costs.times)
    ranks = stages if ranks is None else ranks
    check_counts(ranks=ranks, microbatches=microbatches)
    check_size(stages, microbatches)
    caps = caps_of(cap, ranks)
    named = placed(costs, microbatches, ranks, placement)
    problems = {
        place: Problem(costs, place, microbatches, caps)
        for place in dict.fromkeys(each.placement for each in named)
    }
    known = sorted(_within(problems, named), key=_length)
    found = known[:1]
    start = min(_begun(problems, known), key=_length, default=None)
    if start is not None:
        problem = problems[start.schedule.placement]
        better = improve(start.schedule, problem, work, least=problem.least)
        # It has to be legal for every wiring (see ``routes``): where a stage takes nothing of the
        # one before, an order may be too free.
        if better is not None and (costs.wiring is None or not replay(better.schedule).waits):
            found.append(better)
    if not found:
        least = min((max(peak_memory(each, costs.memory)) for each in named), default=math.inf)
        raise ScheduleError(
            f"no schedule found within the cap {cap}; the most frugal named one keeps {least:g} on "
            "its fullest rank: raise the cap, or cut the batch into more microbatches"
        )
    return replace(min(found, key=_length).schedule, name="auto")


def placed(
    costs: Costs, microbatches: int, ranks: int, placement: Sequence[int] | None
) -> list[Schedule]:
    """The named schedules of that placement, or all.

    Raises:
        ScheduleError: none admits the counts or that placement.
    """
    named = list(named_schedules(costs.times, microbatches, ranks, placement))
    if not named and placement is not None:
        raise ScheduleError(f"no named schedule places the stages on the ranks {list(placement)}")
    if not named:
        raise ScheduleError(
            f"{len(costs.times)} stages cannot fill {ranks} ranks: each rank needs at least one "
            "stage"
        )
    return named


def caps_of(cap: float | Sequence[float], ranks: int) -> tuple[float, ...]:
    """One cap for each rank.

    Raises:
        ScheduleError: a cap that is no number > 0, or not as many as there are ranks.
    """
    caps = tuple(cap) if isinstance(cap, Sequence) else (cap,) * ranks
    if len(caps) != ranks or not all(each > 0 for each in caps):
        raise ScheduleError(f"cap must be a number > 0, or one for each of {ranks}; got {cap!r}")
    return caps


def _length(played: PlayedOrder) -> float:
    return played.makespan


def _within(problems: Problems, schedules: Iterable[Schedule]) -> Iterator[PlayedOrder]:
    """Those that run within the caps."""
    for schedule in schedules:
        problem = problems[schedule.placement]
        played = None if problem.over(schedule) else problem.play(schedule)
        if played is not None:
            yield played


def _begun(problems: Problems, known: Sequence[PlayedOrder]) -> Iterator[PlayedOrder]:
    """Orders to begin from, named or constructed."""
    yield from _within(
        problems, (problems[each.schedule.placement].opened(each.schedule) for each in known)
    )
    for problem in problems.values():
        made = (construct(problem, forward_first) for forward_first in (True, False))
        yield from _within(problems, (each for each in made if each is not None))
