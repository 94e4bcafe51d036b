"""Flat buffers of gradients that several ranks reduce, cut into buckets.

    first W of a step    a bucket's buffer is allocated; W writes gradients into views of it
    later Ws             gradients are added to these views
    last W of a step     as soon as all gradients of a bucket are added, it is all-reduced in place
    publish              ``.grad`` is the view
    end of the actions   the other buckets are all-reduced; the rank waits for all

All ranks of a process group start reductions in the order of ``GradientBuckets.buckets``: a
complete bucket waits for the buckets before it. So ranks may have different gradients.

Buffers are new in each step and live as long as a ``.grad`` refers to them. Gradients that the user
kept from earlier steps are therefore not changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.mesh.costs import Link, measure_all_reduce
from autosplit.pipeline.simulation.collectives import BUCKET_BYTES, StageCollectives
from autosplit.ranks.groups import Groups
from autosplit.runtime.accumulators import CompletionReport
from autosplit.torch_internals.dtensor import (
    is_dtensor,
    local_tensor,
    redistribute_gradient,
    with_sharding_of,
)

Wait: TypeAlias = "Callable[[], None]"
"""Waits for a reduction, and puts its result into ``.grad``. Raises LostPeerError if another rank
did not take part.
"""

PEERS = "the ranks that hold the same parameters"


class LocalCopies(NamedTuple):
    """This rank's copies of one parameter.

    Attributes:
        copies: the parameter's tensors on this rank: one for each stage that has its own copy of a
            tied parameter.
        process_group: the group of all ranks that have a copy; None if no other rank has a copy.
        is_tied: whether several stages have a copy.
    """

    copies: Sequence[Tensor]
    process_group: dist.ProcessGroup | None
    is_tied: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameter's ``.grad``."""
        first = self.copies[0]
        return getattr(first, "grad_dtype", None) or first.dtype


class GradientBucket:
    """Gradients that one all-reduce carries, in one flat tensor:

        [ gradient of member 0 | gradient of member 1 | ... | one flag for each member ]

    A flag is positive if the member has a gradient on any rank. If no rank has one, ``.grad``
    becomes None, as in autograd, so that the optimizer skips the parameter.

    Args:
        members: the parameters whose gradients the bucket carries; all of one process group and
            dtype.
        groups: the trainer's process groups.
        synchronize: a function that waits until the device has finished.
        shares: the number by which summed gradients are divided.

    Attributes:
        members: as passed.
        name: the bucket's name in error texts.
    """

    name = "a bucket"

    def __init__(
        self,
        members: Sequence[LocalCopies],
        groups: Groups,
        synchronize: Callable[[], None],
        shares: int,
    ) -> None:
        self.members, self._shares = members, shares
        self._groups, self._synchronize = groups, synchronize
        self._shapes = [local_tensor(member.copies[0]).shape for member in members]
        self._views: list[Tensor] = []
        self._flat = torch.empty(0)
        self._written: set[int] = set()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients."""
        return sum(shape.numel() for shape in self._shapes) * self.members[0].dtype.itemsize

    @property
    def flag_bytes(self) -> int:
        """Bytes of the flags."""
        return len(self.members) * self.members[0].dtype.itemsize

    def view(self, number: int) -> Tensor:
        """Return the part of the buffer for a member's gradient; allocate it at the first call."""
        if not self._views:
            sizes = [shape.numel() for shape in self._shapes]
            first = self.members[0]
            length = sum(sizes) + len(sizes)
            self._flat = torch.empty(length, dtype=first.dtype, device=first.copies[0].device)
            parts = self._flat[: sum(sizes)].split(sizes)
            self._views = [*map(Tensor.view, parts, self._shapes)]
        return self._views[number]

    def place_sum(self, number: int) -> Tensor:
        """Return the part of the buffer into which the caller writes a member's gradient sum."""
        self._written.add(number)
        return self.view(number)

    def release(self) -> None:
        """Drop the reference to the buffer. Gradients that are views of the buffer keep it
        alive.
        """
        self._views, self._flat = [], torch.empty(0)
        self._written.clear()

    def start(self, *, is_published: bool = True) -> Wait:
        """Start the all-reduce.

        Args:
            is_published: whether gradients are in ``.grad``; gradients that are not views of the
                buffer are copied into it. If False, all gradients are sums in the buffer, not yet
                published.
        """
        fill = self._fill if is_published else self._complete
        has_gradient = [*map(fill, range(len(self.members)))]
        flags = self._flat[-len(self.members) :]
        flags.copy_(flags.new_tensor(has_gradient))
        work, process_group = None, self.members[0].process_group
        if process_group is not None:
            with self._groups.as_lost_peer(PEERS):
                work = dist.all_reduce(self._flat, group=process_group, async_op=True)

        def wait_for_gradients() -> None:
            """Wait for the all-reduce, and set ``.grad`` of all copies."""
            if work is not None:
                activity = self._groups.activity
                with activity.during(f"the reduction of {self.name}"):
                    with self._groups.as_lost_peer(f"{PEERS}, for {self.name}"):
                        work.wait()
                    self._synchronize()
            has_gradient = flags.tolist()
            if self._shares > 1:
                self._flat.div_(self._shares)
            for number, member in enumerate(self.members):
                self._publish(member, self._views[number] if has_gradient[number] else None)
            self.release()

        return wait_for_gradients

    def _complete(self, number: int) -> bool:
        """Return whether W has written a member's gradient; set it to zero if not."""
        if number not in self._written:
            self.view(number).zero_()
        return number in self._written

    def _fill(self, number: int) -> bool:
        """Copy a member's gradients into the buffer; return whether this rank has one."""
        view, is_filled = self.view(number), False
        for copy in self.members[number].copies:
            redistribute_gradient(copy)
            if copy.grad is None:
                continue
            if copy.grad is not view:
                # A sparse gradient can be added to a dense tensor, but not copied into one.
                gradient = local_tensor(copy.grad)
                (view if is_filled else view.zero_()).add_(gradient)
                copy.grad = None  # freed before the next is copied
            is_filled = True
        if not is_filled:
            view.zero_()
        return is_filled

    @staticmethod
    def _publish(member: LocalCopies, total: Tensor | None) -> None:
        for number, copy in enumerate(member.copies):
            gradient = None if total is None else with_sharding_of(copy, total)
            # Each copy after the first gets memory of its own.
            copy.grad = gradient.clone() if number and gradient is not None else gradient


class GradientBuckets:
    """The buckets of all gradients that this rank reduces.

    W writes a gradient directly into its bucket if the sum and ``.grad`` have one dtype, one stage
    has the parameter, and the parameter is no DTensor. Other gradients have memory of their own,
    and are copied into separate buckets at the end of the step.

    Args:
        members: the parameters; the order is the same on all ranks of a process group.
        stages: for each stage of this rank, its parameters.
        groups: the trainer's process groups.
        synchronize: a function that waits until the device has finished.
        shares: the number by which summed gradients are divided; None: the number of the batch's
            shares.

    Attributes:
        buckets: the buckets, in the order in which their reductions start, which is the same on all
            ranks of a process group.
    """

    def __init__(
        self,
        members: Sequence[LocalCopies],
        stages: Mapping[int, Iterable[Tensor]],
        groups: Groups,
        synchronize: Callable[[], None],
        shares: int | None = None,
    ) -> None:
        self._members, self._groups, self._synchronize = members, groups, synchronize
        self._shares = groups.layout.shares if shares is None else shares
        self._stage_of = {id(p): stage for stage, parts in stages.items() for p in parts}
        holders = Counter(map(id, chain.from_iterable(stages.values())))
        self._direct = {
            id(first): member.dtype
            for member in members
            for first in member.copies[:1]
            if holders[id(first)] == 1 and not is_dtensor(first)
        }
        self.buckets: list[GradientBucket] = []
        self._places: dict[int, tuple[GradientBucket, int]] = {}
        self._writers: list[set[int]] = []  # stages that write into the first buckets
        self._pending: list[set[int]] = []  # stages whose last W is still to come, by bucket
        self._waits: list[Wait] = []  # for reductions that have started
        self.arrange({}, None)

    def arrange(self, order: Mapping[int, int], sum_dtype: torch.dtype | None) -> None:
        """Cut the buffers into buckets.

        Args:
            order: maps the ``id`` of a parameter to its place in the order in which gradients are
                complete; equal on all ranks of a process group.
            sum_dtype: the dtype of the sums; None for the dtype of each parameter.
        """

        def sort_key(member: LocalCopies) -> tuple[bool, bool, int]:
            """Sort key of a gradient. First come gradients that W writes into their bucket, then
            other gradients, and last those of tied parameters. Ranks with different stages complete
            the gradients of tied parameters in different orders.
            """
            (first, *_), is_tied = member.copies, member.is_tied
            is_direct = is_tied or self._direct.get(id(first)) is (sum_dtype or first.dtype)
            return is_tied, not is_direct, 0 if is_tied else order.get(id(first), len(order))

        kinds: dict[object, list[LocalCopies]] = defaultdict(list)
        for member in sorted(self._members, key=sort_key):
            kinds[*sort_key(member)[:2], member.process_group, member.dtype].append(member)
        buckets = [
            GradientBucket(part, self._groups, self._synchronize, self._shares)
            for kind in kinds.values()
            for part in _cut(kind)
        ]
        self.buckets = sorted(buckets, key=lambda bucket: sort_key(bucket.members[-1]))
        self._writers = []
        for number, bucket in enumerate(self.buckets):
            bucket.name = f"bucket {number + 1} of {len(self.buckets)} of gradients"
            if not any(sort_key(bucket.members[-1])[:2]):
                members = [id(member.copies[0]) for member in bucket.members]
                self._writers.append({*map(self._stage_of.__getitem__, members)})
        self._places = {
            id(member.copies[0]): (bucket, number)
            for bucket in self.buckets
            for number, member in enumerate(bucket.members)
            if id(member.copies[0]) in self._direct
        }

    def written_by_weights(self, sum_dtype: torch.dtype | None) -> list[GradientBucket]:
        """Return the buckets into which W writes; other buckets are filled after the last W.

        Args:
            sum_dtype: the dtype of the sums; None for the dtype of each parameter.
        """
        return [
            bucket
            for bucket in self.buckets
            if any(
                self._direct.get(id(first)) is (sum_dtype or first.dtype)
                for first, *_ in (member.copies for member in bucket.members)
            )
        ]

    def has_place(self, parameter: Tensor) -> bool:
        """Whether W writes the parameter's gradient into a bucket."""
        return id(parameter) in self._places

    def memory_for(self, parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the view of the buffer for a parameter's gradient, not initialized.

        Args:
            parameter: the parameter.
            dtype: the dtype of the sum of its gradients.

        Returns:
            None if the sum must have memory of its own.
        """
        if self._direct.get(id(parameter)) is not dtype or parameter.grad is not None:
            return None
        bucket, number = self._places[id(parameter)]
        return bucket.place_sum(number)

    def report_for(self, stage: int, module: nn.Module) -> CompletionReport | None:
        """Return the report that a stage's last W of a step calls when its part of a bucket is
        complete. The report starts reductions. None if W writes no bucket of the stage.

        Args:
            stage: the stage.
            module: the stage's module, which names the parameters.
        """
        numbers = {
            id(member.copies[0]): number
            for number, _ in enumerate(self._writers)
            for member in self.buckets[number].members
        }
        parts: dict[int, set[str]] = defaultdict(set)
        # A graph may have either name of a parameter that has two.
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in numbers:
                parts[numbers[id(parameter)]].add(name)
        order = sorted(parts)

        def complete(part: int) -> None:
            self._complete(stage, order[part])

        names = tuple([frozenset(parts[number]) for number in order])
        return CompletionReport(names, complete) if names else None

    def measure_reductions(self) -> dict[int, StageCollectives]:
        """Measure all-reduces, and return the reductions that the last W of each stage starts;
        collective over the ranks that have copies.
        """
        links: dict[dist.ProcessGroup, Link] = {}
        seconds: dict[int, list[float]] = defaultdict(list)
        for bucket, stages in zip(self.buckets, self._writers, strict=False):
            group = bucket.members[0].process_group
            if group is None:
                continue
            if group not in links:
                with self._groups.as_lost_peer(PEERS):
                    links[group] = measure_all_reduce(group)
            for stage in stages:
                seconds[stage].append(links[group].duration(bucket.gradient_bytes) / len(stages))
        return {
            stage: StageCollectives(reduction=sum(parts), parts=len(parts))
            for stage, parts in seconds.items()
        }

    def begin(self) -> None:
        """Begin a step: drop the last step's buffers, and mark every stage's part of each bucket as
        incomplete.
        """
        self.release()
        self._pending = [{*stages} for stages in self._writers]

    def _complete(self, stage: int, number: int) -> None:
        """Record that a stage has completed its part of a bucket, and start the reductions that are
        now possible.
        """
        self._pending[number].discard(stage)
        while len(self._waits) < len(self._pending) and not self._pending[len(self._waits)]:
            self._waits.append(self.buckets[len(self._waits)].start(is_published=False))

    def start(self) -> list[Wait]:
        """Start the reductions that have not started; return the waits for all reductions, in
        order.
        """
        self._waits += [bucket.start() for bucket in self.buckets[len(self._waits) :]]
        return self._waits

    def release(self) -> None:
        """Drop the references to the buffers of a step."""
        self._waits = []
        for bucket in self.buckets:
            bucket.release()


def _cut(members: Iterable[LocalCopies]) -> list[list[LocalCopies]]:
    """Divide members of one dtype into parts of ``BUCKET_BYTES`` or a little more."""
    parts: list[list[LocalCopies]] = [[]]
    size = 0
    for member in members:
        if size >= BUCKET_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(member)
        size += local_tensor(member.copies[0]).numel() * member.dtype.itemsize
    return parts
