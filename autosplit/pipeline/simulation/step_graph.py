"""A step as a graph of numbered actions, with the messages between them and their links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from autosplit.pipeline.schedule.routes import Feeds, Parcel, needs_of, parcels_of, result_of
from autosplit.pipeline.schedule.schedule import Action, Schedule

from .transfer import Transfer

INSTANT = Transfer()
"""Links that cost nothing."""


class Message(NamedTuple):
    """A parcel on its way from the action that makes it to one rank.

    Attributes:
        parcel: its number.
        link: the ranks at both ends; None if the parcel takes no time, as on its own rank.
        took: seconds for which it keeps the link.
        latency: seconds from then to its arrival.
    """

    parcel: int
    link: tuple[int, int] | None
    took: float
    latency: float


class StepGraph:
    """Actions on their ranks, numbered in order, and what each needs and makes, numbered as well.

    A parcel is a result on its way to one stage on one rank, which alone waits for it.

    Args:
        schedule: where stages lie; legal or not.
        placed: rank and action of every node; None: those of the schedule, rank by rank.
        feeds: who feeds whom; None: each stage the next.
        transfer: the links between ranks.

    Attributes:
        actions: by number.
        ranks: of every action, the rank that runs it.
        needs: of every action, the parcels that it takes.
        makes: of every action, the messages that it sends; of several actions that make the same,
            such as an I and a B, only the first to run sends it.
        parcels: by number.
        takers: of every parcel, the rank that waits for it.
        makers: of every parcel, the first action that makes it; -1 if none does.
    """

    def __init__(
        self,
        schedule: Schedule,
        placed: Iterable[tuple[int, Action]] | None = None,
        *,
        feeds: Feeds | None = None,
        transfer: Transfer = INSTANT,
    ) -> None:
        self._schedule = schedule
        self._feeds = feeds or Feeds(schedule.stages)
        self._transfer = transfer
        placed = list(_listed(schedule) if placed is None else placed)
        self.actions = [action for _, action in placed]
        self.ranks = [rank for rank, _ in placed]
        self.parcels: list[Parcel] = []
        self.takers: list[int] = []
        self.makers: list[int] = []
        self._of_result: dict[Action, list[int]] = defaultdict(list)
        self.needs = [
            tuple(
                [self._number(need, action.stage, rank) for need in needs_of(action, self._feeds)]
            )
            for rank, action in placed
        ]
        send = self._at_once if transfer == INSTANT else self._sent
        self.makes = [tuple(send(result_of(action), rank)) for rank, action in placed]
        for number, messages in enumerate(self.makes):
            for message in messages:
                if self.makers[message.parcel] < 0:
                    self.makers[message.parcel] = number

    def add(self, rank: int, action: Action) -> int:
        """One more action, which needs and makes nothing yet; its number."""
        number = len(self.actions)
        self.actions.append(action)
        self.ranks.append(rank)
        self.needs.append(())
        self.makes.append(())
        return number

    def _number(self, result: Action, stage: int, rank: int) -> int:
        """The number of a result on its way to a stage on a rank."""
        numbers = self._of_result[result]
        for number in numbers:
            if self.takers[number] == rank and self.parcels[number].stage == stage:
                return number
        numbers.append(len(self.parcels))
        self.parcels.append(Parcel(result, stage))
        self.takers.append(rank)
        self.makers.append(-1)
        return numbers[-1]

    def _at_once(self, result: Action, _: int) -> list[Message]:
        return [Message(number, None, 0.0, 0.0) for number in self._of_result.get(result, ())]

    def _sent(self, result: Action, rank: int) -> list[Message]:
        """The messages of a result, in the order in which links carry them."""
        messages: list[Message] = []
        for parcel in parcels_of(result, self._feeds):
            if not 0 <= parcel.stage < self._schedule.stages:  # of an action that does not exist
                continue
            home = self._schedule.placement[parcel.stage]
            if home == rank:
                continue
            took = self._transfer.seconds(parcel.boundary)
            number = self._number(result, parcel.stage, home)
            messages.append(Message(number, (rank, home), took, self._transfer.latency))
        travelling = {message.parcel for message in messages}
        for number in self._of_result.get(result, ()):
            if number not in travelling:
                messages.append(Message(number, None, 0.0, 0.0))
        return messages


def _listed(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for rank, row in enumerate(schedule.ranks):
        yield from ((rank, action) for action in row)
