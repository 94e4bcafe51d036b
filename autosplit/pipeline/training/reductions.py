"""Gradients reduced over ranks at the end of a step: in buckets, all under way at once.

They start behind the last action of a rank. Started beside Ws that remained, they made steps of
replicas no shorter.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.pipeline.engine.control import Losing
from autosplit.torch_internals.dtensor import lay_gradient_out, like, local_tensor

CAP = 25 * 2**20
"""Bytes of a bucket, as DistributedDataParallel has them, but for a parameter that has more."""


class GradientReduction(ABC):
    """One reduction over ranks, of the gradients of some parameters.

    Args:
        parameters: which.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._before: list[Tensor | None] = []

    def begin(self) -> None:
        """Put the gradients that are there aside: those to come are reduced."""
        self._before = [each.grad for each in self._parameters]
        for each in self._parameters:
            each.grad = None

    def give_back(self) -> None:
        """Put them back, in place of what has come since."""
        for each, gradient in zip(self._parameters, self._before, strict=True):
            each.grad = gradient

    @abstractmethod
    def start(self) -> None:
        """Start to reduce the gradients that have come, which are complete; does not wait."""

    @abstractmethod
    def wait(self, settled: Callable[[], None]) -> None:
        """Wait until the result is in ``.grad``, see ``finish``."""

    def finish(self, settled: Callable[[], None]) -> None:
        """Wait, and add the result to what was put aside.

        Args:
            settled: waits until the device has done what it was given.

        Raises:
            LostPeerError: another rank did not take part.
        """
        self.wait(settled)
        with torch.no_grad():
            for each, earlier in zip(self._parameters, self._before, strict=True):
                if earlier is not None:
                    each.grad = earlier if each.grad is None else earlier + each.grad
        self._before = []


@contextlib.contextmanager
def reducing(
    reductions: Sequence[GradientReduction], settled: Callable[[], None]
) -> Iterator[None]:
    """Reduce the gradients that come inside, in one order on all ranks that take part.

    What was there before stays, once, so that steps can accumulate. After an error in the block,
    only that is there.

    Raises:
        LostPeerError: another rank did not take part.
    """
    for each in reductions:
        each.begin()
    try:
        yield
    except BaseException:
        for each in reductions:
            each.give_back()
        raise
    for each in reductions:
        each.start()
    for each in reductions:
        each.finish(settled)


@dataclass(frozen=True)
class Member:
    """This rank's copies of one parameter that other ranks hold too, or that is tied.

    Attributes:
        copies: what this rank holds of it, one or more.
        link: connects all ranks that hold a copy; None if no other does.
    """

    copies: Sequence[nn.Parameter]
    link: dist.ProcessGroup | None

    @property
    def dtype(self) -> torch.dtype:
        """That of the gradients."""
        return getattr(self.copies[0], "grad_dtype", None) or self.copies[0].dtype

    @property
    def elements(self) -> int:
        """Those that this rank has."""
        return local_tensor(self.copies[0]).numel()


class Bucket(GradientReduction):
    """Some members that are alike in link and dtype; their gradients are one message.

    Ranks of one link make the same buckets of the same members, and start them in the same order.
    Two copies get the same sum, bit for bit: it does not matter which of two numbers comes first.

    Args:
        members: in the same order on all ranks.
        losing: waits for the others.
        parts: by what to divide the sum, for a mean.
    """

    def __init__(self, members: Sequence[Member], losing: Losing, parts: int = 1) -> None:
        super().__init__([copy for member in members for copy in member.copies])
        self._members = members
        self._losing = losing
        self._divisor = parts
        self._sizes = [member.elements for member in members]
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self) -> None:
        first = self._members[0]
        count = len(self._members)
        # The last numbers say which members have a gradient anywhere: without one, autograd
        # leaves None, and an optimizer passes the parameter over.
        flat = self._flat = torch.zeros(
            sum(self._sizes) + count, dtype=first.dtype, device=first.copies[0].device
        )
        for place, (member, part) in enumerate(zip(self._members, self._parts(flat), strict=True)):
            for copy in member.copies:
                lay_gradient_out(copy)
                if copy.grad is not None:
                    gradient = local_tensor(copy.grad)
                    part.view(gradient.shape).add_(gradient)
                    flat[place - count] = 1
        if first.link is not None:
            with self._losing(_OTHERS):
                self._work = dist.all_reduce(flat, group=first.link, async_op=True)

    def wait(self, settled: Callable[[], None]) -> None:
        if self._work is not None:
            with self._losing(_OTHERS):
                self._work.wait()
            settled()
        flat, self._flat, self._work = self._flat, None, None
        if flat is None:
            return
        given = flat[-len(self._members) :].tolist()
        if self._divisor > 1:
            flat.div_(self._divisor)
        for member, part, there in zip(self._members, self._parts(flat), given, strict=True):
            for number, copy in enumerate(member.copies):
                total = like(copy, part.view(local_tensor(copy).shape)) if there else None
                copy.grad = total.clone() if number and total is not None else total

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        return iter(flat.split([*self._sizes, len(self._members)])[:-1])


_OTHERS = "a rank that shares a parameter"


def buckets_of(members: Sequence[Member], losing: Losing, *, parts: int = 1) -> list[Bucket]:
    """Buckets of all members; only those that are alike share one.

    Args:
        members: in the same order on all ranks.
        losing: waits for the others.
        parts: by what to divide sums.
    """
    found: list[list[Member]] = []
    filling: dict[Hashable, tuple[list[Member], int]] = {}
    for member in members:
        kind, size = (id(member.link), member.dtype), member.elements * member.dtype.itemsize
        bucket, filled = filling.get(kind, ([], 0))
        if not bucket or filled + size > CAP:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(member)
        filling[kind] = bucket, filled + size
    return [Bucket(bucket, losing, parts) for bucket in found]
