"""Gradients of tied parameters, summed across ranks a bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .process_groups import Losing

_MOST = 2**25
"""Bytes of one message, but for a parameter that has more."""


@dataclass(frozen=True)
class Member:
    """This rank's copies of one tied parameter.

    Attributes:
        copies: what this rank holds of it, one or more.
        owner: the rank whose values it starts with.
        link: connects all ranks that hold a copy; None if no other does.
        stage: the stage that holds it on all of them; None where several do.
    """

    copies: Sequence[nn.Parameter]
    owner: int
    link: dist.ProcessGroup | None
    stage: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """That of the gradients."""
        return getattr(self.copies[0], "grad_dtype", None) or self.copies[0].dtype


class Bucket:
    """Some members that are alike in link, stage and dtype; their gradients are one message.

    Ranks of one link make the same buckets of the same members, and start them in the same order.
    Two copies get the same sum, bit for bit: it does not matter which of two numbers comes first.

    Args:
        members: in the same order on all ranks.
        losing: waits for the others.
    """

    def __init__(self, members: Sequence[Member], losing: Losing) -> None:
        self._members = members
        self._losing = losing
        self._sizes = [member.copies[0].numel() for member in members]
        self._before: list[list[Tensor | None]] = []
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def stage(self) -> int | None:
        """See ``Member``."""
        return self._members[0].stage

    def begin(self) -> None:
        """Put the gradients that are there aside."""
        self._before = [[copy.grad for copy in member.copies] for member in self._members]
        for member in self._members:
            for copy in member.copies:
                copy.grad = None

    def give_back(self) -> None:
        """Put back what ``begin`` put aside, in place of what has come since."""
        for member, before in zip(self._members, self._before, strict=True):
            for copy, gradient in zip(member.copies, before, strict=True):
                copy.grad = gradient

    def start(self) -> None:
        """Start to add up the gradients that have come since ``begin``."""
        first = self._members[0]
        count = len(self._members)
        # The last numbers say which members have a gradient anywhere: without one, autograd
        # leaves None, and an optimizer passes the parameter over.
        flat = torch.zeros(
            sum(self._sizes) + count, dtype=first.dtype, device=first.copies[0].device
        )
        for place, (member, part) in enumerate(zip(self._members, self._parts(flat), strict=True)):
            for gradient in (copy.grad for copy in member.copies):
                if gradient is not None:
                    part.view(gradient.shape).add_(gradient)
                    flat[place - count] = 1
        self._flat = flat
        if first.link is not None:
            with self._losing("a rank that shares a parameter"):
                self._work = dist.all_reduce(flat, group=first.link, async_op=True)

    def finish(self, settled: Callable[[], None]) -> None:
        """Give every copy the sum, added to what was put aside.

        Args:
            settled: waits until the device has done what it was given.

        Raises:
            LostPeerError: a rank that holds a copy did not take part.
        """
        if self._work is not None:
            with self._losing("a rank that shares a parameter"):
                self._work.wait()
            settled()
        flat, self._flat, self._work = self._flat, None, None
        if flat is None:
            return
        given = flat[-len(self._members) :].tolist()
        rows = zip(self._members, self._parts(flat), given, self._before, strict=True)
        for member, part, there, before in rows:
            for number, (copy, earlier) in enumerate(zip(member.copies, before, strict=True)):
                if not there:
                    copy.grad = earlier
                    continue
                total = part.view(copy.shape)
                if earlier is not None:
                    copy.grad = earlier + total
                else:
                    copy.grad = total.clone() if number else total
        self._before = []

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        return iter(flat.split([*self._sizes, len(self._members)])[:-1])


def buckets_of(members: Iterable[Member], losing: Losing) -> list[Bucket]:
    """Buckets of all members, in their order; neighbours that are alike share one."""
    buckets = []
    for _, alike in groupby(members, key=lambda m: (id(m.link), m.stage, m.dtype)):
        part: list[Member] = []
        size = 0
        for member in alike:
            more = member.copies[0].numel() * member.dtype.itemsize
            if part and size + more > _MOST:
                buckets.append(Bucket(part, losing))
                part, size = [], 0
            part.append(member)
            size += more
        buckets.append(Bucket(part, losing))
    return buckets
