"""Remedies for ranks that hold too many activations: keep some on a partner rank, keep some in the
host's memory, or recompute some.

Balancing is that of BPipe (Kim et al., ICML 2023). The partner of rank r of P is rank P-1-r, which
accepts the activations of whole microbatches. A rank evicts the activations that it will use last;
in 1F1B these are of its latest microbatch. The paper's bound is ceil((N+2)/2) microbatches: 1F1B
holds N+1 microbatches on two partners together, and one is in transit.

Offloading is that of PipeOffload (Wan et al., arXiv 2503.01328). The activations that live longest
are offloaded: all need the same two transfers, however long they live.

Where activations are recomputed, F keeps only the stage's inputs, and runs again. RECOMPUTE is an
action of its own before the backward that needs the activations. So it can run while the rank waits
for gradients, and serves both I and W.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from operator import itemgetter

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.moves import ALLOCATING
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs

from .bounding import (
    Insertions,
    MemoryRemedy,
    OffloadWindow,
    PlacementRule,
    RankTimeline,
    Residency,
    bring_below,
    insert_actions,
    keep_limit,
    necessary_windows,
    offload_windows,
    single_ranks,
)

_BALANCE_RULES = [
    PlacementRule(lead, True, slack) for lead, slack in product((0, 1), (0.0, 0.5, 1.0))
]
_OFFLOAD_RULES = [PlacementRule(lead, waits) for lead, waits in product((0, 1, 2), (False, True))]
_FREE = 1.002  # a step up to this much longer counts as no longer
_HALVINGS = 7


# --- balance --------------------------------------------------------------------------------------


def balance(
    schedule: Schedule,
    bound: float | Sequence[float] | None = None,
    *,
    costs: Costs | None = None,
) -> Schedule:
    """Add moves to a schedule, so that no rank holds more than ``bound``; the excess is kept on its
    partner.

    Rows of ranks within the bound are not changed.

    Args:
        schedule: a legal schedule without EVICT.
        bound: the most that a rank may hold of its microbatches at once, however long transfers
            take, in the unit of ``costs.memory``: one number, or one for each rank. None: for 1F1B
            over N ranks, the bound of BPipe's paper, ceil((N+2)/2) microbatches; for other
            schedules, half of the memory of a rank and its partner, plus one microbatch.
        costs: the costs of every stage; None: all stages have equal times and memory, and saved and
            deferred tensors of a microbatch count as 1 each.

    Raises:
        ScheduleError: the schedule has EVICT actions already, or the bound cannot be kept; the text
            then names the smallest bound that can be kept.
    """
    if ActionKind.EVICT in schedule.kinds:
        raise ScheduleError(
            f"{schedule.name!r} evicts already, as after an earlier balance(): pass the schedule "
            "without EVICT actions"
        )
    if costs is None:
        count = schedule.stages
        costs = Costs([(1.0, 1.0, 1.0)] * count, [StageMemory(1.0, 1.0)] * count)
    bounds = _paper_bounds(schedule, costs) if bound is None else bound
    return keep_limit("balancing", add_partner_moves, schedule, costs, bounds)


def add_partner_moves(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """Add moves until bounds are kept, or until no further move helps."""
    pairs = [(low, schedule.partner(low)) for low in range(len(schedule.ranks) // 2)]

    def propose(schedule: Schedule, sides: Sequence[RankTimeline]) -> Iterator[Schedule]:
        """Yield schedules in which one rank of a pair keeps its excess on the other, by different
        rules.
        """
        partner, donor = sorted(sides, key=lambda side: max(side.level) - bounds[side.rank])
        spans = zip(donor.starts, donor.reached[1:], strict=False)
        shortest = min((end - start for start, end in spans), default=0.0)
        for rule in _BALANCE_RULES:
            windows = offload_windows(donor, rule, 1)
            windows = necessary_windows(donor.level, bounds[donor.rank], windows)
            yield insert_actions(
                schedule, _exchanges(donor, partner, windows, rule.slack * shortest)
            )

    return bring_below(schedule, costs, bounds, pairs, propose)


def _paper_bounds(schedule: Schedule, costs: Costs) -> list[float]:
    peaks = peak_memory(schedule, costs.memory)
    unit = max(max(size.saved, size.deferred) for size in costs.memory) or 1.0
    pair = max(map(sum, zip(peaks, reversed(peaks), strict=True)))
    return [unit * math.ceil((pair / unit + 1) / 2 - 1e-9)] * len(peaks)


def _exchanges(
    donor: RankTimeline, partner: RankTimeline, windows: Sequence[OffloadWindow], late: float
) -> Insertions:
    """Return the moves to insert into the rows of a donor and its partner, in the same order in
    both rows.

    The partner's half of a move is inserted at the last slot that the partner reaches, by the
    present timelines, at most ``late`` seconds after the donor starts its half. Before the partner
    accepts activations, it waits until the activations that it is returning have left.
    """
    events = [(donor.starts[window.out], False, window) for window in windows]
    events += [(donor.starts[window.arrival], True, window) for window in windows]
    events.sort(key=itemgetter(0, 1))
    donor_moves: list[tuple[int, Action]] = []
    partner_moves: list[tuple[int, Action]] = []
    latest = 0
    for moment, returns, window in events:
        latest = max(latest, partner.slot_at(moment + late))
        kind = ActionKind.RETURN if returns else ActionKind.ACCEPT
        partner_moves.append((latest, window.action(kind)))
        if returns:
            donor_moves.append((window.arrival, window.action(ActionKind.LOAD)))
            if not ALLOCATING.isdisjoint(partner.kinds[latest:]):
                partner_moves.append((latest, window.action(ActionKind.AWAIT)))
        else:
            donor_moves.append((window.out, window.action(ActionKind.EVICT)))
            if window.awaited:
                donor_moves.append((window.out, window.action(ActionKind.AWAIT)))
    return [(donor, donor_moves), (partner, partner_moves)]


# --- offload --------------------------------------------------------------------------------------


def offload(
    schedule: Schedule, costs: Costs, limit: float | Sequence[float] | None = None
) -> Schedule:
    """Add offloads to a schedule, so that no rank holds more than ``limit``; the excess is kept in
    the host's memory.

    Args:
        schedule: a legal schedule.
        costs: the costs of every stage; ``costs.transfer.host`` is the link to the host's memory.
        limit: the most that a rank may hold of its microbatches at once, however long transfers
            take, in the unit of ``costs.memory``: one number, or one for each rank. None: the least
            that the link's bandwidth allows without a longer step.

    Raises:
        ScheduleError: the limit cannot be kept; the text has a limit that offloading can keep.
    """
    if limit is None:
        return _offload_for_free(schedule, costs)
    return keep_limit("offloading", add_offloads, schedule, costs, limit)


def add_offloads(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """Add offloads until bounds are kept, or until no further offload helps."""

    def propose(schedule: Schedule, sides: Sequence[RankTimeline]) -> Iterator[Schedule]:
        """Yield schedules in which one rank offloads just enough to keep its bound, by different
        choices of windows.
        """
        (timeline,) = sides
        for rule, order, fraction in product(_OFFLOAD_RULES, (1, -1), (1.0, 0.75)):
            # Offload what is used last, or first; a lower bound may leave each transfer more time.
            windows = offload_windows(timeline, rule, 0)[::order]
            windows = necessary_windows(timeline.level, fraction * bounds[timeline.rank], windows)
            moves = [(window.out, 0, window.action(ActionKind.OFFLOAD)) for window in windows]
            moves += [(w.out, 1, w.action(ActionKind.AWAIT)) for w in windows if w.awaited]
            moves += [(window.arrival, 2, window.action(ActionKind.RELOAD)) for window in windows]
            ordered = [(slot, move) for slot, _, move in sorted(moves, key=itemgetter(0, 1))]
            yield insert_actions(schedule, [(timeline, ordered)])

    return bring_below(schedule, costs, bounds, single_ranks(schedule), propose)


def _offload_for_free(schedule: Schedule, costs: Costs) -> Schedule:
    """Offload as much as the step's length allows: bisect the smallest share of each rank's peak
    that offloading can keep without a longer step.
    """
    longest = _FREE * costs.timeline(schedule).step_time
    peaks = peak_memory(schedule, costs.memory)
    best, low, high = schedule, 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        candidate = add_offloads(schedule, costs, [share * peak for peak in peaks])
        if costs.timeline(candidate).step_time <= longest:
            best, high = candidate, share
        else:
            low = share
    return best


# --- recompute ------------------------------------------------------------------------------------


def recompute(schedule: Schedule, costs: Costs, limit: float | Sequence[float]) -> Schedule:
    """Add recomputations to a schedule, so that no rank holds more than ``limit``.

    Args:
        schedule: a legal schedule.
        costs: the costs of every stage, with the size of the inputs that F keeps.
        limit: the most that a rank may hold of its microbatches at once, in the unit of
            ``costs.memory``: one number, or one for each rank.

    Raises:
        ScheduleError: the limit cannot be kept; the text has a limit that recomputing can keep.
    """
    return keep_limit("recomputing", add_recomputations, schedule, costs, limit)


def add_recomputations(schedule: Schedule, costs: Costs, bounds: Sequence[float]) -> Schedule:
    """Add recomputations until bounds are kept, or until no further recomputation helps."""

    def freed(residency: Residency) -> float:
        return residency.size - costs.memory[residency.stage].dropped

    def propose(schedule: Schedule, sides: Sequence[RankTimeline]) -> Iterator[Schedule]:
        """Yield the schedule in which one rank recomputes just enough activations to keep its
        bound.
        """
        (timeline,) = sides
        candidates = (
            OffloadWindow(r, r.first + 1, r.first + 1, r.last)
            for r in timeline.residencies
            if timeline.kinds[r.first] is ActionKind.FORWARD and freed(r) > 0.0
        )
        # A recomputation that would run in a wait is dropped last.
        windows = sorted(
            (window for window in candidates if window.slots),
            key=lambda window: timeline.idle_seconds(window.arrival),
        )
        windows = necessary_windows(timeline.level, bounds[timeline.rank], windows, freed)
        actions = [(window.arrival, window.action(ActionKind.RECOMPUTE)) for window in windows]
        yield insert_actions(schedule, [(timeline, actions)])

    return bring_below(schedule, costs, bounds, single_ranks(schedule), propose)


REMEDIES: Mapping[str, MemoryRemedy] = {
    "balance": add_partner_moves,
    "offload": add_offloads,
    "recompute": add_recomputations,
}
"""The remedies by name."""
