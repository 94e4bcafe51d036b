"""Control messages between ranks: plain data and small sums, over a separate Gloo group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from autosplit.errors import PipelineError
from autosplit.text.figures import few


def gather_in(value: object, group: dist.ProcessGroup | None, call: str = "") -> list[Any]:
    """Gather ``value`` from every rank of a group; collective.

    Args:
        value: an object that can be pickled.
        group: the group; None for the default group.
        call: the trainer's call that gathers, as text for errors.

    Returns:
        The values by rank, on every rank.

    Raises:
        RuntimeError: a rank did not take part.
        PipelineError: the ranks are in different calls.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (call, value), group=group)
    members = dist.get_process_group_ranks(group)
    _check_calls({rank: name for rank, (name, _) in zip(members, gathered, strict=True)})
    return [item for _, item in gathered]


def _check_calls(calls: Mapping[int, str]) -> None:
    """Refuse ranks in different calls, because each would misread the values of the others."""
    if len({*calls.values()}) > 1:
        ranks: dict[str, list[str]] = {}
        for rank, call in sorted(calls.items()):
            ranks.setdefault(call, []).append(f"rank {rank}")
        states = "; ".join(f"{few(members, 8)} in {call}" for call, members in ranks.items())
        raise PipelineError(
            f"ranks are in different calls of one trainer: {states}. Every rank must make the "
            "same calls in the same order: put no call under a condition such as `if rank == 0`"
        )


ALL_PEERS = "the other ranks"

LostPeerContext = Callable[[str], AbstractContextManager[None]]
"""Takes the name of a peer and guards a wait for it, see ``groups.as_lost_peer``."""


class Control:
    """Collectives on plain data, on the host, over some ranks.

    Args:
        members: the ranks, by their numbers in the default process group. Their order gives their
            numbers in this object.
        world_rank: this rank's number in the default process group.
        group: connects the members over Gloo; None for a single rank.
        as_lost_peer: a function that returns a context, entered around each wait for members, which
            turns a failed wait into a LostPeerError.
        call: a function that returns this rank's present call of the trainer, as text for errors.

    Attributes:
        rank: this rank's number among the members.
        ranks: the number of members.
        members: see Args.
        as_lost_peer: see Args.
        most_numbers: the most numbers of ``all_reduce_and``, equal on all members.
    """

    most_numbers = 3

    def __init__(
        self,
        members: Sequence[int],
        world_rank: int,
        group: dist.ProcessGroup | None,
        as_lost_peer: LostPeerContext,
        call: Callable[[], str] = str,
    ) -> None:
        self.members = tuple(members)
        self.rank = self.members.index(world_rank)
        self.ranks = len(self.members)
        self._group, self._call = group, call
        self.as_lost_peer = as_lost_peer

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the members."""
        if self._group is None:
            raise PipelineError("this trainer was closed: build a new one")
        return self._group

    @property
    def store(self) -> Store:
        """The key-value store of the group, to which only the members write."""
        return self.group.get_group_store()

    def drop_group(self) -> None:
        """Drop the reference to the group."""
        self._group = None

    def barrier(self) -> None:
        """Wait until every rank has made this call.

        Raises:
            LostPeerError: a rank did not make the call.
        """
        self.all_reduce_and()

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum a CPU tensor over all ranks, in place.

        Returns:
            A function that waits for the sum and returns it. It raises LostPeerError if a rank did
            not take part.

        Raises:
            LostPeerError: a rank is known to be gone.
        """
        with self.as_lost_peer(ALL_PEERS):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def wait_for_sum() -> Tensor:
            if work is not None:
                with self.as_lost_peer(ALL_PEERS):
                    work.wait()
            return tensor

        return wait_for_sum

    def all_reduce_and(self, *numbers: int) -> list[int]:
        """Reduce up to ``most_numbers`` int64 numbers over all ranks with bitwise AND.

        Raises:
            LostPeerError: a rank did not take part.
            PipelineError: the ranks are in different calls.
        """
        if self.ranks == 1:
            return [*numbers]
        call, padding = crc32(self._call().encode()), [0] * (self.most_numbers - len(numbers))
        # The size is the same in all calls, as ranks may be in different ones.
        values = [call, ~call, *numbers, *padding]
        reduced = torch.tensor(values, dtype=torch.int64, device="cpu")
        with self.as_lost_peer(ALL_PEERS):
            dist.all_reduce(reduced, dist.ReduceOp.BAND, group=self.group)
        ones, zeros, *common = reduced.tolist()
        if ones | zeros != -1:  # the ranks are in different calls
            self.gather(None)  # raises, on all ranks
        return common[: len(numbers)]

    def broadcast(self, numbers: Sequence[int], source: int) -> list[int]:
        """Return the numbers of rank ``source`` on every rank; ``source`` does not wait.

        Raises:
            LostPeerError: a rank did not take part.
        """
        if self.ranks == 1:
            return [*numbers]
        origin = self.members[source]
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        with self.as_lost_peer(ALL_PEERS if source == self.rank else f"rank {origin}"):
            dist.broadcast(tensor, origin, group=self.group)
        return tensor.tolist()

    def gather(self, value: Any, awaited: str = ALL_PEERS) -> list[Any]:
        """Gather ``value`` from every rank; collective.

        Args:
            value: an object that can be pickled.
            awaited: the peers for which this rank waits, as text for errors.

        Returns:
            The values by rank, on every rank.

        Raises:
            LostPeerError: a rank did not take part.
            PipelineError: the ranks are in different calls.
        """
        if self.ranks == 1:
            return [value]
        with self.as_lost_peer(awaited):
            rows = gather_in(value, self.group, self._call())
        # The members of a group are in the order of their numbers in the default one.
        order = sorted(self.members)
        return [rows[order.index(member)] for member in self.members]
