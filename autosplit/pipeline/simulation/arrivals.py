"""When results are made in a simulated step, and when they are where they are needed."""

from __future__ import annotations

from collections import defaultdict

from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.dependency import needs_of
from autosplit.pipeline.schedule.routes import (
    Parcel,
    parcels_for,
    parcels_of,
    positions_of,
    target_of,
)
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds

from .transfer import Transfer

INSTANT = Transfer()
"""Links that cost nothing."""


class Arrivals:
    """What is made so far, and the links that it goes over.

    Args:
        schedule: who runs what, legal or not.
        transfer: the links between ranks.
        feeds: who feeds whom; None: each stage the next.

    Attributes:
        made: when each result was there, and on which rank.
        sent: by the ranks at both ends, what went over each link that takes time, in order.
    """

    def __init__(self, schedule: Schedule, transfer: Transfer, feeds: Feeds | None) -> None:
        self._schedule = schedule
        self._transfer = transfer
        self._feeds = feeds
        self.made: dict[Action, tuple[float, int]] = {}
        self.sent: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
        self._arrived: dict[Parcel, float] = {}
        self._link_free: dict[tuple[int, int], float] = {}

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The results that must be on the rank of ``action`` before it starts."""
        needs = needs_of(action, self._schedule.stages)
        if self._feeds is None:
            return needs
        own = (need for need in needs if need.stage == action.stage)
        return (*own, *(parcel.result for parcel in parcels_for(action, self._feeds)))

    def add(self, result: Action, rank: int, end: float) -> None:
        """``result`` is made, and sent to whoever needs it, behind all that was before."""
        if result in self.made:
            return
        self.made[result] = end, rank
        if self._transfer == INSTANT:
            return
        for parcel in self.parcels(result):
            link = rank, self._schedule.home(parcel.stage, result.microbatch)
            if link[0] == link[1]:
                continue
            took, latency = self.travel(parcel, *link)
            free = max(end, self._link_free.get(link, 0.0)) + took
            self._link_free[link] = free
            self._arrived[parcel] = free + latency
            self.sent[link].append(parcel)

    def at(self, result: Action, stage: int, rank: int) -> float:
        """When ``stage`` can use ``result`` on ``rank``."""
        end, source = self.made[result]
        return end if source == rank else self._arrived.get(Parcel(result, stage), end)

    def parcels(self, result: Action) -> tuple[Parcel, ...]:
        """What becomes of a result: one parcel for each stage that it goes to."""
        if self._feeds is not None:
            return parcels_of(result, self._feeds)
        target = target_of(result, self._schedule.stages)
        return () if target is None else (Parcel(result, target),)

    def travel(self, parcel: Parcel, source: int, target: int) -> tuple[float, float]:
        """Seconds for which a parcel keeps the link between two ranks, and then to its arrival;
        none on one rank.
        """
        if source == target:
            return 0.0, 0.0
        latency, bandwidth = self._transfer.link(source, target)
        return self._bytes(parcel) / bandwidth, latency

    def _bytes(self, parcel: Parcel) -> float:
        if self._feeds is None or self._feeds.wiring is None:
            return self._transfer.bytes_of(parcel.result)
        positions = positions_of(parcel, self._schedule, self._feeds) or ()
        outputs = self._feeds.wiring.outputs[parcel.boundary]
        return self._transfer.bytes_with(parcel, positions, outputs)
