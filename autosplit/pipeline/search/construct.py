"""List scheduling with look-ahead: build an order by playing the step through in time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.pipeline.schedule.action import ActionKind

from .problem import FORWARD, FULL, INPUT, KINDS, WEIGHT, Problem, Rows


@dataclass(frozen=True)
class Policy:
    """What a free rank prefers.

    Attributes:
        forward_first: F before I while there is memory, else I before F.
        patience: rather wait for an F or I that is known to arrive within this fraction of a W.
        in_flight: at most so many pairs of a stage and a microbatch between F and W on a rank.
    """

    forward_first: bool
    patience: float
    in_flight: float = math.inf


class _Ranks:
    """What each rank has run and keeps, and what is next of each stage and kind."""

    def __init__(self, problem: Problem) -> None:
        count = len(problem.caps)
        self.rows: Rows = [[] for _ in range(count)]
        self.free_at = [0.0] * count
        self.kept = [0.0] * count
        self.flying = [0] * count
        self.next = {(stage, kind): 0 for stage in range(len(problem.placement)) for kind in KINDS}
        self.whole: set[int] = set()  # Ws that a B has done
        self.stages = [
            [stage for stage, rank in enumerate(problem.placement) if rank == each]
            for each in range(count)
        ]


def construct(problem: Problem, policy: Policy) -> Rows | None:
    """An order of all actions within the caps, or None if the policy runs into a dead end."""
    ranks = _Ranks(problem)
    ready = [math.inf] * len(problem.makers)
    links: dict[tuple[int, int], float] = {}
    looks = [(0.0, rank) for rank in range(len(problem.caps))]
    left = 3 * len(problem.placement) * problem.microbatches
    while looks:
        now, rank = heapq.heappop(looks)
        if ranks.free_at[rank] > now:
            continue
        action = _choose(problem, policy, ranks, ready, rank, now)
        if action is None:
            continue
        left -= 2 if problem.actions[action].kind is FULL else 1
        end = now + problem.seconds[action]
        _run(problem, ranks, action, end)
        for parcel, link, took, latency in problem.makes[action]:
            ready[parcel] = end
            if link is not None:
                links[link] = max(end, links.get(link, 0.0)) + took
                ready[parcel] = links[link] + latency
                heapq.heappush(looks, (ready[parcel], link[1]))
        heapq.heappush(looks, (end, rank))
    return None if left else ranks.rows


def _run(problem: Problem, ranks: _Ranks, action: int, end: float) -> None:
    rank, what = problem.rank[action], problem.actions[action]
    ranks.rows[rank].append(action)
    ranks.free_at[rank] = end
    ranks.kept[rank] += problem.adds[action] - problem.frees[action]
    ranks.flying[rank] += {FORWARD: 1, INPUT: 0, WEIGHT: -1, FULL: -1}[what.kind]
    ranks.next[what.stage, INPUT if what.kind is FULL else what.kind] += 1
    if what.kind is FULL:
        ranks.whole.add(problem.part(action, WEIGHT))
    while _number(problem, what.stage, WEIGHT, ranks.next[what.stage, WEIGHT]) in ranks.whole:
        ranks.next[what.stage, WEIGHT] += 1


def _choose(
    problem: Problem,
    policy: Policy,
    ranks: _Ranks,
    ready: Sequence[float],
    rank: int,
    now: float,
) -> int | None:
    """The best action that can start now; None to wait."""
    best: tuple[tuple[float, ...], int] | None = None
    soonest = math.inf
    for stage in ranks.stages[rank]:
        for kind in (FORWARD, INPUT):
            action = _next(problem, ranks, stage, kind)
            if action is not None and kind is INPUT and problem.whole[stage]:
                action = _whole_or_apart(problem, ranks, action)
            if action is None or not _has_room(problem, policy, ranks, action):
                continue
            start = max((ready[parcel] for parcel in problem.needs[action]), default=0.0)
            soonest = min(soonest, start)
            if start <= now:
                is_forward = kind is FORWARD
                # Of two Fs the one nearest to the loss, of two Is the one nearest to the start.
                order = (is_forward != policy.forward_first, -stage if is_forward else stage)
                best = min(best, (order, action)) if best else (order, action)
    if best is not None:
        return best[1]
    pending = [_next(problem, ranks, stage, WEIGHT) for stage in ranks.stages[rank]]
    weights = [action for action in pending if action is not None]
    if not weights:
        return None
    weight = min(weights, key=lambda action: problem.actions[action].microbatch)
    if soonest - now < policy.patience * problem.seconds[weight]:
        return None
    return weight


def _next(problem: Problem, ranks: _Ranks, stage: int, kind: ActionKind) -> int | None:
    """The stage's next action of a kind, if the stage has run what it needs of itself."""
    microbatch = ranks.next[stage, kind]
    before = problem.microbatches
    if kind is not FORWARD:
        before = ranks.next[stage, KINDS[KINDS.index(kind) - 1]]
    return _number(problem, stage, kind, microbatch) if microbatch < before else None


def _number(problem: Problem, stage: int, kind: ActionKind, microbatch: int) -> int:
    return (stage * len(KINDS) + KINDS.index(kind)) * problem.microbatches + microbatch


def _whole_or_apart(problem: Problem, ranks: _Ranks, inputs: int) -> int:
    """An I, or the B in its place: where that is shorter, or there is no room for what I leaves."""
    full, weight = problem.part(inputs, FULL), problem.part(inputs, WEIGHT)
    rank = problem.rank[inputs]
    shorter = problem.seconds[full] < problem.seconds[inputs] + problem.seconds[weight]
    room = problem.caps[rank] * (1 + 1e-9) - ranks.kept[rank]
    return full if shorter or problem.adds[inputs] > room else inputs


def _has_room(problem: Problem, policy: Policy, ranks: _Ranks, action: int) -> bool:
    """Whether the rank may start ``action``, leaving room for the same microbatch further on.

    A rank that holds a later stage as well would otherwise fill up with what only that stage can
    let go.
    """
    what, rank = problem.actions[action], problem.rank[action]
    later = 0.0
    count = 0
    if what.kind is FORWARD:
        for stage in ranks.stages[rank]:
            if stage > what.stage:
                later += problem.costs.memory[stage].saved
                count += 1
    if what.kind is FORWARD and ranks.flying[rank] + 1 + count > policy.in_flight:
        return False
    room = problem.caps[rank] * (1 + 1e-9) - ranks.kept[rank]
    return problem.adds[action] + later <= room
