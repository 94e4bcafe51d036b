"""What ranks make of a step together: sums of gradients, its losses, its norm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import REPLICATE, SHARD, RankLayout
from autosplit.mesh.exact_norm import norm_of
from autosplit.mesh.reduction import CAP, GradientReduction, fill_buckets
from autosplit.torch_internals.dtensor import lay_gradient_out, like, local_tensor

from .control import Losing
from .first_error import Guard
from .groups import Groups


@dataclass(frozen=True)
class Member:
    """This rank's copies of one parameter that other ranks hold too, or that is tied.

    Attributes:
        copies: what this rank holds of it, one or more.
        owner: the rank of the pipeline whose values it starts with.
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

    @property
    def bytes(self) -> int:
        """Those of the gradient."""
        return self.elements * self.dtype.itemsize

    @property
    def elements(self) -> int:
        """Those that this rank has."""
        return local_tensor(self.copies[0]).numel()


class Bucket(GradientReduction):
    """Some members that are alike in link, stage and dtype; their gradients are one message.

    Ranks of one link make the same buckets of the same members, and start them in the same order.
    Two copies get the same sum, bit for bit: it does not matter which of two numbers comes first.

    Args:
        members: in the same order on all ranks.
        losing: waits for the others.
        parts: by what to divide the sum, for a mean.
    """

    def __init__(self, members: Sequence[Member], losing: Losing, parts: int = 1) -> None:
        super().__init__(members[0].stage)
        self._members = members
        self._copies = [copy for member in members for copy in member.copies]
        self._losing = losing
        self._divisor = parts
        self._sizes = [member.elements for member in members]
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def reduced(self) -> Sequence[nn.Parameter]:
        return self._copies

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
            for copy in member.copies:
                lay_gradient_out(copy)
                if copy.grad is not None:
                    gradient = local_tensor(copy.grad)
                    part.view(gradient.shape).add_(gradient)
                    flat[place - count] = 1
        self._flat = flat
        if first.link is not None:
            start = time.perf_counter()
            with self._losing("a rank that shares a parameter"):
                self._work = dist.all_reduce(flat, group=first.link, async_op=True)
            if self.timed and self._work is not None:
                self._work.get_future().add_done_callback(partial(self._note, start))

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
        if self._divisor > 1:
            flat.div_(self._divisor)
        before = iter(self._before)
        for member, part, there in zip(self._members, self._parts(flat), given, strict=True):
            for number, copy in enumerate(member.copies):
                earlier = next(before)
                if not there:
                    copy.grad = earlier
                    continue
                total = like(copy, part.view(local_tensor(copy).shape))
                if earlier is not None:
                    copy.grad = earlier + total
                else:
                    copy.grad = total.clone() if number else total
        self._before = []

    def _note(self, start: float, _: object) -> None:
        self.times = start, time.perf_counter()

    def _parts(self, flat: Tensor) -> Iterator[Tensor]:
        return iter(flat.split([*self._sizes, len(self._members)])[:-1])


def buckets_of(
    members: Sequence[Member], losing: Losing, *, parts: int = 1, cap: int = CAP
) -> list[Bucket]:
    """Buckets of all members; only those that are alike share one.

    Args:
        members: in the order in which their gradients are complete.
        losing: waits for the others.
        parts: by what to divide sums.
        cap: bytes of a bucket, but for a parameter that has more.
    """
    sizes = [((id(m.link), m.stage, m.dtype), m.bytes) for m in members]
    return [
        Bucket([members[place] for place in places], losing, parts)
        for places in fill_buckets(sizes, cap)
    ]


_ROUNDING = 1e-5
"""By how much, of itself, a loss may differ on ranks that compute it together."""


class Agreement:
    """Losses and gradient norm of a step in flight; having them means that every rank ran it.

    One small sum over all ranks carries the losses of each pipeline (on ranks without them they are
    zero; pipelines of one batch, which share its tensors, must have the same) and the digits of the
    sum of squares of the gradients, exactly: so the norm is the same bits however parameters lie on
    ranks. It is collective, and starts when this is made.

    Args:
        groups: the trainer's process groups.
        guard: the trainer's guard.
        losses: those that this rank has, by microbatch.
        count: how many microbatches there are.
        squares: this rank's ``sum_of_squares``; None where nobody asks for the norm.
        dtype: the dtype of the losses.
        batch: stands for what this rank took of the batch, where other ranks must have the same;
            fewer than 2**46 in all.
    """

    def __init__(
        self,
        groups: Groups,
        guard: Guard,
        losses: Mapping[int, Tensor],
        *,
        count: int,
        squares: Tensor | None,
        dtype: torch.dtype,
        batch: int = 0,
    ) -> None:
        self._guard = guard
        self._dtype = dtype
        layout = groups.layout
        self._losses = len(layout.pipelines) * count
        self._layout = layout
        rows = len(layout.pipelines)
        self._squares = self._losses + rows
        size = self._squares + (0 if squares is None else len(squares))
        numbers = torch.zeros(size, dtype=torch.float64, device="cpu")
        if losses:
            own = torch.stack(tuple(losses.values())).to(numbers)
            numbers[layout.own * count :][list(losses)] = own
        if squares is not None:
            numbers[self._squares :] = squares
        numbers[self._losses + layout.own] = batch
        self._numbers: Callable[[], Tensor] = lambda: numbers
        if groups.everybody.ranks > 1:
            self._numbers = groups.everybody.start_sum(numbers)

    def wait(self) -> Tensor:
        """The loss of each microbatch, shape [M], on the CPU.

        Raises:
            RankError: a rank did not get through the step.
            PipelineError: ranks that share the tensors of a stage have different losses.
        """
        with self._guard("the end of a step"):
            numbers = self._numbers()
            everywhere = numbers[: self._losses].view(len(self._layout.pipelines), -1)
            if len(everywhere) > 1:
                self._check_shared(everywhere, numbers[self._losses : self._squares].tolist())
        return everywhere[self._layout.own].to(self._dtype)

    def _check_shared(self, losses: Tensor, batches: list[float]) -> None:
        """Hold pipelines that share tensors against each other: what each would do by itself."""
        rows: dict[tuple[int, ...], int] = {}
        precision = max(_ROUNDING, 4 * torch.finfo(self._dtype).eps)
        for row, place in enumerate(self._layout.places):
            first = rows.setdefault(place.share, row)
            if batches[first] != batches[row]:
                one, other = self._layout.pipelines[first], self._layout.pipelines[row]
                raise PipelineError(
                    f"the ranks {list(one)} and {list(other)} share the tensors of their stages "
                    "and were given different batches: give all ranks along 'tp' the same one"
                    f"{_own_shares(self._layout)}"
                )
            if not torch.allclose(
                losses[first], losses[row], rtol=precision, atol=0.0, equal_nan=True
            ):
                ends = [self._layout.pipelines[each][-1] for each in (first, row)]
                raise PipelineError(
                    f"the ranks {ends[0]} and {ends[1]} share the tensors of a stage and have the "
                    f"losses {losses[first].tolist()} and {losses[row].tolist()}, which must be "
                    "the same: give all ranks along 'tp' the same batch and the same seed (for "
                    "dropout), and let the loss be one of whole outputs, or loss_parallel()"
                )

    def norm(self) -> float:
        """The norm of the model's gradient; waits like ``wait``."""
        with self._guard("the end of a step"):
            return norm_of(self._numbers()[self._squares :])


def _own_shares(layout: RankLayout) -> str:
    """What other ranks than those along "tp" are to be given; empty where there are none."""
    along = {REPLICATE: layout.replicas, SHARD: layout.shards}
    several = [name for name, ranks in along.items() if ranks > 1]
    if not several:
        return ""
    count = " * ".join(f"mesh[{name!r}].size()" for name in several)
    place = f" * mesh[{SHARD!r}].size() + ".join(f"mesh.get_local_rank({n!r})" for n in several)
    return (
        f", those along {' and '.join(map(repr, several))} shares of their own, as "
        f"DistributedSampler(num_replicas={count}, rank={place}) does"
    )
