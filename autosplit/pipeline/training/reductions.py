"""Gradients reduced over ranks at the end of a step: in buckets, all under way at once.

They start behind the last action of a rank. Started beside Ws that remained, they made steps of
replicas no shorter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.pipeline.engine.control import Losing
from autosplit.torch_internals.dtensor import lay_gradient_out, like, local_tensor

CAP = 25 * 2**20
"""Bytes of a bucket, as DistributedDataParallel has them, but for a parameter that has more."""


Wait = Callable[[Callable[[], None]], None]
"""Waits for a reduction; it is told what waits until the device has done what it was given."""


class Reduction(Protocol):
    """A reduction over ranks, of the gradients of some parameters.

    Attributes:
        parameters: which.
    """

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    def start(self) -> Wait:
        """Start to reduce the gradients that are there, which are complete. What it gives waits
        until the result is in ``.grad``, and raises LostPeerError where another rank did not take
        part.
        """
        ...


@contextlib.contextmanager
def reducing(rounds: Sequence[Sequence[Reduction]], settled: Callable[[], None]) -> Iterator[None]:
    """Reduce the gradients that come inside, round after round, in one order on all ranks that take
    part.

    What was there before stays, once, so that steps can accumulate. After an error, only that is
    there.

    Raises:
        LostPeerError: another rank did not take part.
    """
    parameters = {id(p): p for part in rounds for each in part for p in each.parameters}
    before = [(each, each.grad) for each in parameters.values()]
    for each, _ in before:
        each.grad = None
    try:
        yield
        for part in rounds:
            for wait in [reduction.start() for reduction in part]:
                wait(settled)
    except BaseException:
        for each, earlier in before:
            each.grad = earlier
        raise
    with torch.no_grad():
        for each, earlier in before:
            if earlier is not None:
                each.grad = earlier if each.grad is None else earlier + each.grad


class Member(NamedTuple):
    """This rank's copies of one parameter that other ranks hold too, or that is tied.

    Attributes:
        copies: what this rank holds of it, one or more.
        link: connects all ranks that hold a copy; None if no other does.
    """

    copies: Sequence[nn.Parameter]
    link: dist.ProcessGroup | None


class Bucket:
    """Some members that are alike in link and dtype; their gradients are one message.

    Ranks of one link make the same buckets of the same members, and start them in the same order.
    Two copies get the same sum, bit for bit: it does not matter which of two numbers comes first.

    Args:
        members: in the same order on all ranks.
        dtype: of the gradients.
        losing: waits for the others.
        parts: by what to divide the sum, for a mean.
    """

    def __init__(
        self, members: Sequence[Member], dtype: torch.dtype, losing: Losing, parts: int
    ) -> None:
        self.parameters = [copy for member in members for copy in member.copies]
        self._members, self._dtype = members, dtype
        self._losing, self._divisor = losing, parts
        self._sizes = [local_tensor(member.copies[0]).numel() for member in members]

    def start(self) -> Wait:
        (first, *_), link = self._members[0]
        # The last numbers say which members have a gradient anywhere: without one, autograd
        # leaves None, and an optimizer passes the parameter over.
        size = sum(self._sizes) + len(self._members)
        flat = torch.zeros(size, dtype=self._dtype, device=first.device)
        *parts, given = flat.split([*self._sizes, len(self._members)])
        for place, (member, part) in enumerate(zip(self._members, parts, strict=True)):
            for copy in member.copies:
                lay_gradient_out(copy)
                if copy.grad is not None:
                    gradient = local_tensor(copy.grad)
                    part.view(gradient.shape).add_(gradient)
                    given[place] = 1
        work = None
        if link is not None:
            with self._losing(_OTHERS):
                work = dist.all_reduce(flat, group=link, async_op=True)

        def wait(settled: Callable[[], None]) -> None:
            if work is not None:
                with self._losing(_OTHERS):
                    work.wait()
                settled()
            found = given.tolist()
            if self._divisor > 1:
                flat.div_(self._divisor)
            for member, part, there in zip(self._members, parts, found, strict=True):
                for number, copy in enumerate(member.copies):
                    total = like(copy, part.view(local_tensor(copy).shape)) if there else None
                    copy.grad = total.clone() if number and total is not None else total

        return wait


_OTHERS = "a rank that shares a parameter"


def buckets_of(members: Sequence[Member], losing: Losing, *, parts: int = 1) -> list[Bucket]:
    """Buckets of all members; only those that are alike share one.

    Args:
        members: in the same order on all ranks.
        losing: waits for the others.
        parts: by what to divide sums.
    """
    found: list[tuple[list[Member], torch.dtype]] = []
    filling: dict[Hashable, tuple[list[Member], int]] = {}
    for member in members:
        first = member.copies[0]
        dtype = getattr(first, "grad_dtype", None) or first.dtype
        kind, size = (id(member.link), dtype), local_tensor(first).numel() * dtype.itemsize
        bucket, filled = filling.get(kind, ([], 0))
        if not bucket or filled + size > CAP:
            bucket, filled = [], 0
            found.append((bucket, dtype))
        bucket.append(member)
        filling[kind] = bucket, filled + size
    return [Bucket(bucket, dtype, losing, parts) for bucket, dtype in found]
