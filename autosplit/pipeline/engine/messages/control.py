"""The few numbers that ranks agree on, over a group of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.faults.first_error import KeyValueStore

from . import plain_messages

OTHERS = "the other ranks"

Losing = Callable[[str], AbstractContextManager[None]]
"""Waits for what it is told, see ``Groups.losing``."""


class Sum:
    """A sum over all ranks that is under way."""

    def __init__(self, tensor: Tensor, work: dist.Work | None, losing: Losing) -> None:
        self._tensor = tensor
        self._work = work
        self._losing = losing

    def wait(self) -> Tensor:
        """The sum, once every rank has taken part.

        Raises:
            LostPeerError: some rank did not.
        """
        if self._work is not None:
            with self._losing(OTHERS):
                self._work.wait()
            self._work = None
        return self._tensor


class Control:
    """Plain data and sums over some ranks, on the host.

    Args:
        members: the ranks, as the default process group numbers them, in the order in which they
            are numbered here.
        own: this rank's number in the default process group.
        group: connects them over Gloo; None for a single one.
        losing: waits for them.

    Attributes:
        rank: this rank's number here.
        ranks: how many there are.
        members: see above.
        losing: see above.
    """

    def __init__(
        self,
        members: Sequence[int],
        own: int,
        group: dist.ProcessGroup | None,
        losing: Losing,
    ) -> None:
        self.members = tuple(members)
        self.rank = self.members.index(own)
        self.ranks = len(self.members)
        self._group = group
        self.losing = losing
        # The members of a group are in the order of their numbers in the default one.
        self._places = [sorted(self.members).index(each) for each in self.members]

    @property
    def group(self) -> dist.ProcessGroup:
        """What connects the ranks."""
        if self._group is None:
            raise PipelineError("this trainer was closed: build a new one")
        return self._group

    @property
    def store(self) -> KeyValueStore:
        """A key-value store that the ranks share and nobody else writes to."""
        return self.group.get_group_store()

    def close(self) -> None:
        """Let go of the group."""
        self._group = None

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` (CPU) over all ranks, in place; it comes back only if all took part.

        Raises:
            LostPeerError: some rank did not.
        """
        return self.start_sum(tensor).wait()

    def meet(self) -> None:
        """Wait until every rank is here.

        Raises:
            LostPeerError: some rank did not come.
        """
        self.sum(torch.zeros(1, device="cpu"))

    def start_sum(self, tensor: Tensor) -> Sum:
        """Start to sum ``tensor`` (CPU) over all ranks, in place.

        Raises:
            LostPeerError: a rank is known to be gone.
        """
        if self.ranks == 1:
            return Sum(tensor, None, self.losing)
        with self.losing(OTHERS):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return Sum(tensor, work, self.losing)

    def announce(self, value: str | None, source: int) -> str:
        """``value`` of rank ``source``, on every rank.

        Raises:
            LostPeerError: some rank did not take part.
        """
        if self.ranks > 1:
            origin = self.members[source]
            with self.losing(OTHERS if source == self.rank else f"rank {origin}"):
                value = plain_messages.tell_in(value, origin, self.group)
        return value or ""

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, by rank; see ``plain`` for what it may be.

        Raises:
            LostPeerError: some rank did not take part.
        """
        if self.ranks == 1:
            return [value]
        with self.losing(OTHERS):
            rows = plain_messages.gather_in(value, self.group)
        return [rows[place] for place in self._places]
