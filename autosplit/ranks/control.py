"""Plain data and sums between ranks, over a group of their own."""

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


def gather_in(value: object, group: dist.ProcessGroup | None, doing: str = "") -> list[Any]:
    """``value`` of every rank of a group, by rank, on all of them.

    Args:
        value: what can be pickled.
        group: over which; None for the default group.
        doing: the call that this is part of, in words.

    Raises:
        RuntimeError: a rank did not take part.
        PipelineError: a rank is in another call.
    """
    heard: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, (doing, value), group=group)
    members = dist.get_process_group_ranks(group)
    _check_calls({rank: call for rank, (call, _) in zip(members, heard, strict=True)})
    return [each for _, each in heard]


def _check_calls(calls: Mapping[int, str]) -> None:
    """What ranks in different calls tell each other would be taken for something else."""
    if len({*calls.values()}) > 1:
        ranks: dict[str, list[str]] = {}
        for rank, call in sorted(calls.items()):
            ranks.setdefault(call, []).append(f"rank {rank}")
        told = "; ".join(f"{few(at, 8)} in {call}" for call, at in ranks.items())
        raise PipelineError(
            f"ranks are in different calls of one trainer: {told}. Every rank makes the same calls "
            "in the same order: let none stand under a condition such as `if rank == 0`"
        )


OTHERS = "the other ranks"

Losing = Callable[[str], AbstractContextManager[None]]
"""Waits for what it is told, see ``Groups.losing``."""


class Control:
    """Plain data and sums over some ranks, on the host.

    Args:
        members: the ranks, as the default process group numbers them, in the order in which they
            are numbered here.
        own: this rank's number in the default process group.
        group: connects them over Gloo; None for a single one.
        losing: waits for them.
        doing: the call that this rank is in, in words.

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
        doing: Callable[[], str] = str,
    ) -> None:
        self.members = tuple(members)
        self.rank = self.members.index(own)
        self.ranks = len(self.members)
        self._group, self._doing = group, doing
        self.losing = losing

    @property
    def group(self) -> dist.ProcessGroup:
        """What connects the ranks."""
        if self._group is None:
            raise PipelineError("this trainer was closed: build a new one")
        return self._group

    @property
    def store(self) -> Store:
        """A key-value store that the ranks share and nobody else writes to."""
        return self.group.get_group_store()

    def let_go(self) -> None:
        """Let go of the group."""
        self._group = None

    def meet(self) -> None:
        """Wait until every rank is here.

        Raises:
            LostPeerError: some rank did not come.
        """
        self.common_bits()

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum ``tensor`` (CPU) over all ranks, in place; what it gives waits for the sum,
        and raises LostPeerError where some rank did not take part.

        Raises:
            LostPeerError: a rank is known to be gone.
        """
        with self.losing(OTHERS):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def wait() -> Tensor:
            if work is not None:
                with self.losing(OTHERS):
                    work.wait()
            return tensor

        return wait

    def common_bits(self, *numbers: int) -> list[int]:
        """Of up to three numbers, which are int64, the bits that all ranks have.

        Raises:
            LostPeerError: some rank did not take part.
            PipelineError: a rank is in another call.
        """
        if self.ranks == 1:
            return [*numbers]
        call, padding = crc32(self._doing().encode()), [0] * (3 - len(numbers))
        # Of one size in all calls, as ranks may be in different ones.
        values = [call, ~call, *numbers, *padding]
        found = torch.tensor(values, dtype=torch.int64, device="cpu")
        with self.losing(OTHERS):
            dist.all_reduce(found, dist.ReduceOp.BAND, group=self.group)
        ones, zeros, *common = found.tolist()
        if ones | zeros != -1:  # not of one call
            self.gather(None)  # raises, on all
        return common[: len(numbers)]

    def announce(self, numbers: Sequence[int], source: int) -> list[int]:
        """The numbers of rank ``source``, on every rank; that one does not wait for the others.

        Raises:
            LostPeerError: some rank did not take part.
        """
        if self.ranks == 1:
            return [*numbers]
        found, origin = torch.tensor(numbers, dtype=torch.int64, device="cpu"), self.members[source]
        with self.losing(OTHERS if source == self.rank else f"rank {origin}"):
            dist.broadcast(found, origin, group=self.group)
        return found.tolist()

    def gather(self, value: Any, awaited: str = OTHERS) -> list[Any]:
        """``value`` of every rank, by rank; ``awaited`` is what this waits for, in words.

        Raises:
            LostPeerError: some rank did not take part.
            PipelineError: a rank is in another call.
        """
        if self.ranks == 1:
            return [value]
        with self.losing(awaited):
            rows = gather_in(value, self.group, self._doing())
        # The members of a group are in the order of their numbers in the default one.
        return [rows[sorted(self.members).index(each)] for each in self.members]
