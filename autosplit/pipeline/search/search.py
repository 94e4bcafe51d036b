"""``schedule="auto"``: search the shortest step for measured costs under a cap of memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import Schedule, check_counts, check_size
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.playing import replay
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer

from .local_search import improve
from .problem import PlayedOrder, Problem
from .starts import POLICIES, construct, named_schedules

_STARTS = 3  # orders that local search begins from
_WORK = 450_000  # actions played through in all: about a second

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

    It begins from every named schedule that the counts admit and from list scheduling on their
    placements, all under the cap, and changes the best of them; first with links that cost nothing,
    where that makes a difference. So it is never worse than the best named schedule under the same
    cap, with the links and the wiring that ``costs`` tell of.

    Args:
        costs: of every stage, and how the trainer runs them.
        microbatches: M >= 1.
        ranks: number of processes; None means one for each stage.
        placement: the rank of every stage, where that is settled; None leaves it to the search,
            among the placements of the named schedules.
        cap: the most a rank may keep of its microbatches, in the unit of ``costs.memory``: one
            number, or one for each rank.
        work: actions that may be played through in all.

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
    easy = replace(costs, transfer=Transfer())
    if easy != costs:  # where messages take no time good orders are easier to find
        work //= 2
        with contextlib.suppress(ScheduleError):
            named.append(
                search(easy, microbatches, ranks=ranks, placement=placement, cap=cap, work=work)
            )
    known = sorted(_within(problems, named), key=_length)
    begun = sorted(_begun(problems, known), key=_length)
    starts = _varied(begun)
    found = [played for each in starts for played in _improved(problems, each, work // len(starts))]
    steps = [*known[:1], *found]
    if not steps:
        least = min((max(peak_memory(each, costs.memory)) for each in named), default=math.inf)
        raise ScheduleError(
            f"no schedule found within the cap {cap}; the most frugal named one keeps {least:g} on "
            "its fullest rank: raise the cap, or cut the batch into more microbatches"
        )
    return replace(min(steps, key=_length).schedule, name="auto")


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
        made = (construct(problem, *policy) for policy in POLICIES)
        yield from _within(problems, (each for each in made if each is not None))


def _varied(begun: Sequence[PlayedOrder]) -> list[PlayedOrder]:
    """A few of these: the shortest of each placement, then the rest, each order once."""
    once = {each.schedule.ranks: each for each in reversed(begun)}
    rest = sorted(once.values(), key=_length)
    leaders = {each.schedule.placement: each for each in reversed(rest)}.values()
    others = [each for each in rest if each not in leaders]
    return [*sorted(leaders, key=_length), *others][:_STARTS]


def _improved(problems: Problems, start: PlayedOrder, work: int) -> Iterator[PlayedOrder]:
    """What local search makes of a start, if it is legal for every wiring, as schedules have to be
    (see ``routes``): where a stage takes nothing of the one before, an order may be too free.
    """
    problem = problems[start.schedule.placement]
    found = improve(start.schedule, problem, work, least=problem.least)
    if found is not None and (problem.costs.wiring is None or not replay(found.schedule).waits):
        yield found
