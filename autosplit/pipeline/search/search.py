"""``schedule="auto"``: search the shortest step for measured costs under a cap of memory.

Defer every W for as long as memory allows, so that it is there to run in any wait.

List scheduling with look-ahead: orders to begin a search from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.schedule import Schedule, check_counts, check_size
from autosplit.pipeline.simulation.activation_memory import peak_memory
from autosplit.pipeline.simulation.list_scheduling import ListScheduler
from autosplit.pipeline.simulation.replay import replay
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.transfer import Transfer

from .bound import lower_bound
from .improve import improve
from .named import named_schedules
from .problem import FORWARD, FULL, INPUT, KINDS, WEIGHT, Problem, Rows


@dataclass(frozen=True)
class Policy:
    """What a free rank prefers.

    Attributes:
        forward_first: F before I while there is memory, else I before F.
        patience: rather wait for an F or I that is known to arrive within this fraction of a W.
    """

    forward_first: bool
    patience: float


def construct(problem: Problem, policy: Policy) -> Rows | None:
    """An order of all actions within the caps, or None if the policy runs into a dead end."""
    scheduler = ListScheduler(problem, problem.seconds, len(problem.caps))
    chooser = _Chooser(problem, policy, scheduler)
    scheduler.run(chooser.choose)
    return None if chooser.left else scheduler.rows


class _Chooser:
    """What each rank keeps, and what is next of each stage and kind."""

    def __init__(self, problem: Problem, policy: Policy, scheduler: ListScheduler) -> None:
        count = len(problem.caps)
        self.left = 3 * len(problem.placement) * problem.microbatches
        self._problem = problem
        self._policy = policy
        self._scheduler = scheduler
        self._kept = [0.0] * count
        self._next = {(stage, kind): 0 for stage in range(len(problem.placement)) for kind in KINDS}
        self._whole: set[int] = set()  # Ws that a B has done
        self._stages = [
            [stage for stage, rank in enumerate(problem.placement) if rank == each]
            for each in range(count)
        ]

    def choose(self, rank: int, now: float) -> int | None:
        """The best action that can start now; None to wait."""
        action = self._best(rank, now)
        if action is not None:
            self._run(rank, action)
        return action

    def _best(self, rank: int, now: float) -> int | None:
        best: tuple[tuple[float, ...], int] | None = None
        soonest = math.inf
        for stage in self._stages[rank]:
            for kind in (FORWARD, INPUT):
                action = self._next_of(stage, kind)
                if action is not None and kind is INPUT and self._problem.whole[stage]:
                    action = self._whole_or_apart(action)
                if action is None or not self._has_room(action):
                    continue
                start = self._scheduler.ready(action)
                soonest = min(soonest, start)
                if start <= now:
                    is_forward = kind is FORWARD
                    # Of two Fs the one nearest to the loss, of two Is the one nearest to the start.
                    order = (
                        is_forward != self._policy.forward_first,
                        -stage if is_forward else stage,
                    )
                    best = min(best, (order, action)) if best else (order, action)
        return best[1] if best is not None else self._weight(rank, soonest - now)

    def _weight(self, rank: int, wait: float) -> int | None:
        """The oldest W that can run; None where it is better to ``wait`` for something else."""
        problem = self._problem
        pending = [self._next_of(stage, WEIGHT) for stage in self._stages[rank]]
        weights = [action for action in pending if action is not None]
        if not weights:
            return None
        weight = min(weights, key=lambda action: problem.actions[action].microbatch)
        return None if wait < self._policy.patience * problem.seconds[weight] else weight

    def _run(self, rank: int, action: int) -> None:
        problem, what = self._problem, self._problem.actions[action]
        self.left -= 2 if what.kind is FULL else 1
        self._kept[rank] += problem.adds[action] - problem.frees[action]
        self._next[what.stage, INPUT if what.kind is FULL else what.kind] += 1
        if what.kind is FULL:
            self._whole.add(problem.part(action, WEIGHT))
        while self._number(what.stage, WEIGHT, self._next[what.stage, WEIGHT]) in self._whole:
            self._next[what.stage, WEIGHT] += 1

    def _next_of(self, stage: int, kind: ActionKind) -> int | None:
        """The stage's next action of a kind, if the stage has run what it needs of itself."""
        microbatch = self._next[stage, kind]
        before = self._problem.microbatches
        if kind is not FORWARD:
            before = self._next[stage, KINDS[KINDS.index(kind) - 1]]
        return self._number(stage, kind, microbatch) if microbatch < before else None

    def _number(self, stage: int, kind: ActionKind, microbatch: int) -> int:
        place = stage * len(KINDS) + KINDS.index(kind)
        return place * self._problem.microbatches + microbatch

    def _whole_or_apart(self, inputs: int) -> int:
        """An I, or the B in its place: where that is shorter, or there is no room for what I
        leaves; but not before a W, for the sums of gradients have one order.
        """
        problem, stage = self._problem, self._problem.actions[inputs].stage
        if self._next[stage, WEIGHT] < self._next[stage, INPUT]:
            return inputs
        full, weight = problem.part(inputs, FULL), problem.part(inputs, WEIGHT)
        rank = problem.ranks[inputs]
        shorter = problem.seconds[full] < problem.seconds[inputs] + problem.seconds[weight]
        room = problem.room[rank] - self._kept[rank]
        return full if shorter or problem.adds[inputs] > room else inputs

    def _has_room(self, action: int) -> bool:
        """Whether the rank may start ``action``, leaving room for the same microbatch further on.

        A rank that holds a later stage as well would otherwise fill up with what only that stage
        can let go.
        """
        problem = self._problem
        what, rank = problem.actions[action], problem.ranks[action]
        later = 0.0
        for stage in self._stages[rank] if what.kind is FORWARD else ():
            if stage > what.stage:
                later += problem.costs.memory[stage].saved
        room = problem.room[rank] - self._kept[rank]
        return problem.adds[action] + later <= room


def defer_weights(problem: Problem, rows: Rows) -> Rows:
    """The same order, but each rank runs its Ws, in their order, where it needs their memory."""
    return [_deferred(problem, row, rank) for rank, row in enumerate(rows)]


def _deferred(problem: Problem, row: list[int], rank: int) -> list[int]:
    found: list[int] = []
    waiting: deque[int] = deque()
    kept = 0.0
    for action in row:
        if problem.actions[action].kind is WEIGHT:
            waiting.append(action)
            continue
        while waiting and kept + problem.adds[action] > problem.room[rank]:
            found.append(waiting.popleft())
            kept -= problem.frees[found[-1]]
        found.append(action)
        kept += problem.adds[action] - problem.frees[action]
    return [*found, *waiting]


__all__ = ["caps_of", "placements", "search"]

_POLICIES = [
    Policy(forward_first, patience)
    for forward_first in (True, False)
    for patience in (0.0, 0.5, 1.0)
]
_STARTS = 3  # orders that local search begins from
_WORK = 450_000  # actions played through in all: about a second
_FEWEST, _MOST = 20, 4000  # plays from each start
_TOLERANCE = 1e-9  # of a step: lengths that differ by rounding are equal

Start = tuple[float, Problem, Rows]
"""An order of a problem that runs within the caps, with its length first."""


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
    placements, all under the cap, and changes the best of them along the critical path; first with
    links that cost nothing and Ws where they are, where that makes a difference. So it is
    never worse than the best named schedule under the same cap, with the links, the wiring and the
    Ws in waits that ``costs`` tell of.

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
    named = _placed(costs, microbatches, ranks, placement)
    problems = _problems(costs, microbatches, caps, named)
    known = _known(problems, named)
    easy = replace(costs, transfer=Transfer(), early_weights=False, slices=1, reductions=None)
    if easy != costs:  # where messages take no time good orders are easier to find
        work //= 2
        found = _improved(_starts(_problems(easy, microbatches, caps, named), known), work)
        known = _known(problems, [*known, *([] if found is None else [found[1]])])
    found = _improved(_starts(problems, known), work)
    if known:
        step, placed = _with_reductions(costs.timeline(known[0]).makespan, known[0], costs)
        if found is None or found[0] >= step:
            return replace(placed, name="auto")
    if found is None:
        least = min((max(peak_memory(each, costs.memory)) for each in named), default=math.inf)
        raise ScheduleError(
            f"no schedule found within the cap {cap}; the most frugal named one keeps {least:g} on "
            "its fullest rank: raise the cap, or cut the batch into more microbatches"
        )
    return found[1]


def placements(
    costs: Costs, microbatches: int, ranks: int, placement: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Where a search puts the stages: as told, or as each named schedule does.

    Raises:
        ScheduleError: no named schedule admits the counts or that placement.
    """
    named = _placed(costs, microbatches, ranks, placement)
    return list(dict.fromkeys(each.placement for each in named))


def _placed(
    costs: Costs, microbatches: int, ranks: int, placement: Sequence[int] | None
) -> list[Schedule]:
    """The named schedules of that placement, or all."""
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


def _problems(
    costs: Costs, microbatches: int, caps: Sequence[float], named: Sequence[Schedule]
) -> dict[tuple[int, ...], Problem]:
    """By placement."""
    return {
        placement: Problem(costs, placement, microbatches, caps)
        for placement in dict.fromkeys(each.placement for each in named)
    }


def _known(
    problems: Mapping[tuple[int, ...], Problem], schedules: Sequence[Schedule]
) -> list[Schedule]:
    """Those within the caps, the shortest first."""
    steps = []
    for schedule in schedules:
        problem = problems[schedule.placement]
        for makespan, *_ in _played(problem, problem.numbers_of(schedule)):
            steps.append((makespan, schedule))
    return [schedule for _, schedule in sorted(steps, key=lambda each: each[0])]


def _played(problem: Problem, rows: Rows) -> Iterator[Start]:
    """The order with its length, if it runs within the caps."""
    if all(map(problem.fits, rows, range(len(rows)))):
        played = problem.play(rows)
        if played is not None:
            yield played.makespan, problem, rows


def _starts(problems: Mapping[tuple[int, ...], Problem], known: Sequence[Schedule]) -> list[Start]:
    """The shortest orders to begin from, named or constructed.

    Where stages are placed so that no order can be shorter than one that is known, none is looked
    for.
    """
    bounds = {placement: lower_bound(problem) for placement, problem in problems.items()}
    starts: list[Start] = []
    for each in known:
        starts += _begun(problems[each.placement], problems[each.placement].rows_of(each))
    for placement, problem in problems.items():
        if bounds[placement] < _shortest(starts):
            for policy in _POLICIES:
                starts += _begun(problem, construct(problem, policy))
    varied, shortest = _varied(starts), _shortest(starts)
    worth = (start for start in varied[1:] if bounds[start[1].placement] < shortest)
    return [*varied[:1], *worth][:_STARTS]


def _begun(problem: Problem, rows: Rows | None) -> Iterator[Start]:
    """An order to begin from; where Ws run in waits, the same with its Ws put off, too."""
    if rows is not None:
        yield from _played(problem, rows)
        if problem.costs.early_weights:
            yield from _played(problem, defer_weights(problem, rows))


def _shortest(starts: Sequence[Start]) -> float:
    """Less than this is shorter than all of them by more than rounding."""
    return min((start[0] for start in starts), default=math.inf) * (1 - _TOLERANCE)


def _varied(starts: Sequence[Start]) -> list[Start]:
    """The shortest of each placement, then the rest, the shortest first; each order once."""
    leaders, rest = [], []
    seen: set[tuple[int, ...]] = set()
    orders: set[str] = set()
    for start in sorted(starts, key=lambda each: each[0]):
        _, problem, rows = start
        if problem.placement not in seen:
            leaders.append(start)
        elif str(rows) not in orders:
            rest.append(start)
        seen.add(problem.placement)
        orders.add(str(rows))
    return leaders + rest


def _improved(starts: Sequence[Start], work: int) -> tuple[float, Schedule] | None:
    """The shortest schedule that local search reaches from the starts."""
    best: tuple[float, Schedule] | None = None
    for _, problem, rows in starts:
        share = work // (len(problem.actions) * len(starts))
        found = improve(problem, rows, max(_FEWEST, min(_MOST, share)))
        if found is None:
            continue
        step, schedule = _with_reductions(
            found.makespan, problem.schedule("auto", found.rows), problem.costs
        )
        if best is not None and step >= best[0]:
            continue
        if _runs_as_chain(schedule, problem.costs):
            best = step, schedule
    return best


def _with_reductions(step: float, schedule: Schedule, costs: Costs) -> tuple[float, Schedule]:
    """A step of so many seconds, with its last Ws placed for what replicas reduce behind them."""
    if costs.reductions is None:
        return step, schedule
    rows = costs.reductions.placed(schedule.ranks, costs.seconds)
    placed = replace(schedule, ranks=rows)
    return costs.timeline(placed).makespan, placed


def _runs_as_chain(schedule: Schedule, costs: Costs) -> bool:
    """Whether it is legal for every wiring, as schedules have to be (see ``routes``).

    Where a stage takes nothing of the one before, an order may be too free for that.
    """
    return costs.wiring is None or not replay(schedule, lambda action: 1.0).waits
