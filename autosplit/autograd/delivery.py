"""``Delivery``: runs W of pending microbatches and accumulates into ``.grad``.

Directly where that is the same as what autograd's engine would do, through the engine elsewhere;
and in place, while W runs, where it may. ``ShardedDelivery``: of a module that ``fully_shard`` has
sharded, whose gradients are then reduced.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import EXACT, Accumulation
from autosplit.runtime.residuals import State, TensorSpec
from autosplit.torch_internals.autograd import (
    KnownLeaves,
    Leaves,
    add_gradients,
    has_gradient_hooks,
    without_autocast,
)
from autosplit.torch_internals.dtensor import Sharding, is_dtensor, local_tensor

from .pending import PendingBound, PendingQueue, PendingWork, summed_gradients

if TYPE_CHECKING:
    from autosplit.sharded.module import ShardedModule


class Delivery:
    """Computes weight gradients and accumulates them as an ordinary ``backward()`` would.

    Hooks do not fire: a parameter had none when the backward ran, which would have computed its
    gradient itself. Where data parallelism looks on, or several calls share one backward,
    autograd's engine hands them over; otherwise they are added to ``.grad`` directly, which is
    the same and spares the engine's time for every parameter.

    Args:
        accumulation: how they are added. In any form but the exact one W adds into ``.grad``
            itself where it may (see ``inplace_sums``), one thread at a time. In the concatenated
            one, W of several microbatches runs in one call.

    Attributes:
        accumulation: as given.
        leaves: the parameters.
        reduced: whether data parallelism looks on: set once a forward was inside of it.
    """

    def __init__(self, accumulation: Accumulation = EXACT) -> None:
        self.accumulation = accumulation
        self.leaves = KnownLeaves()
        self.reduced = False
        self._lock = threading.Lock()  # two threads must not both find .grad empty

    def __call__(self, microbatches: Iterable[Sequence[PendingWork]]) -> None:
        """Compute and deliver what some ``backward()`` left, in their order.

        With concatenated accumulation, those that follow each other and ran the same graph on the
        same parameters and buffers go through one W.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        waiting = list(microbatches)
        while waiting:
            works = waiting.pop(0)
            leaves = self.added_directly(works)
            if leaves is None:
                self._deliver_through_engine(works)
                continue
            group = [*works]
            while self.accumulation.concatenated and waiting and _fit(works, waiting[0]):
                group += waiting.pop(0)
            self._add(group, leaves)

    def added_directly(self, works: Sequence[PendingWork]) -> Leaves | None:
        """The parameters, where their gradients may be added to ``.grad`` directly."""
        work = works[0]
        graph = work.graph
        if (
            len(works) > 1
            or self.reduced
            or work.skipped
            or not isinstance(graph, SplitFunctions)
            or not graph.dependence.dense
        ):
            return None
        leaves = self._leaves_of(work)
        return leaves if leaves.allows_direct_add() else None

    def _leaves_of(self, work: PendingWork) -> Leaves:
        return self.leaves.of(work.graph.parameter_names, work.state)

    def _deliver_through_engine(self, works: Sequence[PendingWork]) -> None:
        whole = [work for work in works if isinstance(work.graph, SplitFunctions)]
        hooked = any(self._leaves_of(work).has_hooks() for work in whole)
        deliver_through_engine(works, hooked=hooked)

    def _add(self, works: Sequence[PendingWork], leaves: Leaves) -> None:
        """One microbatch, or several in one W."""
        with torch.no_grad(), without_autocast():
            if self.accumulation.exact or not self._add_inside(works):
                grads = summed_gradients(works)
                with self._lock:
                    add_gradients(leaves.parameters, grads, works[0].graph.borrowed)

    def _add_inside(self, works: Sequence[PendingWork]) -> bool:
        """Have W add into ``.grad``, and add the gradients that I made; False where W must not."""
        graph, state = works[0].graph, works[0].state
        early = graph.early_parameters
        # Not held while W lets go of it.
        read = (tensor for work in works for tensor in (*work.deferred.read, *work.early))
        with self._lock:
            sums = inplace_sums(graph, graph.late_parameters, state, read)
            if sums is None:
                return False
            handed = [work.deferred for work in works]
            graph.backward_weight_together(handed, sums, self.accumulation)
            note_written(sums)
            borrowed = [name in graph.dependence.borrowed for name in early]
            for work in works if early else ():
                add_gradients([state[name] for name in early], work.early, borrowed)
        return True


def weight_gradients(work: PendingWork) -> list[Tensor | None]:
    """A gradient for each of ``parameter_names``, to be handed to autograd: None where there is
    none, and each a tensor of its own.
    """
    named = work.named_gradients().items()
    return [None if name in work.skipped else grad for name, grad in named]


def _fit(one: Sequence[PendingWork], other: Sequence[PendingWork]) -> bool:
    """Whether W of two microbatches can run in one call."""
    return len(one) == len(other) == 1 and run_together(one[0], other[0])


def run_together(one: PendingWork, other: PendingWork) -> bool:
    """Whether W of two pieces of work can run in one call: of one graph, on the same parameters."""
    graph = one.graph
    if graph is not other.graph or one.skipped or other.skipped:
        return False
    same = all(one.state[name] is other.state[name] for name in graph.parameter_names)
    return same and bool(graph.concatenates(one.deferred, other.deferred))


def deliver_through_engine(works: Sequence[PendingWork], *, hooked: bool = False) -> None:
    """Compute and accumulate in one pass of autograd's engine, as of one ``backward()``: a
    parameter that several of the works have a gradient for gets one sum. No hook of a tensor fires.

    A parameter may have been frozen since the backward that its gradient is of, or have got a hook,
    which is to see the gradients of later backwards only. So where it was, the engine accumulates
    into a leaf in its place, which has its memory and its ``.grad``.

    Args:
        works: of one backward.
        hooked: whether autograd's nodes of their parameters may have hooks, which are not to fire.
    """
    # The engine runs the newest node first: gradients add up in the order of the works.
    targets = [(work, dict(work.named_leaves())) for work in reversed(works)]
    replaced: dict[int, tuple[Tensor, Tensor]] = {}

    def leaf_for(parameter: Tensor) -> Tensor:
        if parameter.requires_grad and not hooked and not has_gradient_hooks([parameter]):
            return parameter
        if id(parameter) not in replaced:
            leaf = parameter.detach().requires_grad_()
            kind = getattr(parameter, "grad_dtype", leaf.dtype)
            if kind is not leaf.dtype:
                leaf.grad_dtype = kind
            leaf.grad = parameter.grad
            replaced[id(parameter)] = parameter, leaf
        return replaced[id(parameter)][1]

    with torch.enable_grad():
        roots = [
            _WeightGradients.apply(work, list(named), *map(leaf_for, named.values()))  # type: ignore[no-untyped-call]
            for work, named in targets
            if named
        ]
        if roots:
            try:
                torch.autograd.backward(roots)
            finally:
                for parameter, leaf in replaced.values():
                    parameter.grad = leaf.grad


class _WeightGradients(torch.autograd.Function):
    """A root whose backward is W: the engine hands the gradients straight to the parameters."""

    @staticmethod
    def forward(ctx: Any, work: PendingWork, names: list[str], *parameters: Tensor) -> Tensor:
        ctx.work, ctx.names = work, names
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        work, ctx.work = ctx.work, None
        gradients = work.named_gradients()
        return (None, None, *(gradients[name] for name in ctx.names))


def inplace_sums(
    graph: SplitFunctions, names: Sequence[str], state: State, read: Iterable[Tensor | None]
) -> list[Tensor] | None:
    """The parameters' ``.grad`` as accumulators; None where W must not add into them.

    A graph is compiled for sums of its gradients' own dtype, and may write one sum before it has
    read what the others are made from. So every ``.grad`` must be there, be an ordinary tensor
    that lies as its parameter does, and share no memory with another or with what the graph reads.
    One that is a DTensor must lie over ranks as the graph's gradient does.

    Args:
        graph: that adds.
        names: of the parameters; dense ones, that do not overlap themselves.
        state: has them.
        read: what the graph reads; storages are compared whole.
    """
    sums: list[Tensor] = []
    specs, lying = graph.dependence.gradient_specs, graph.gradient_shardings
    for name in names:
        parameter = state[name]
        total = parameter.grad
        if total is None or not _lies(total, lying.get(name)):
            return None
        if not _fits(local_tensor(total), local_tensor(parameter), specs[name]):
            return None
        sums.append(total)
    return sums if sums and _apart([*map(local_tensor, sums)], read) else None


def note_written(sums: Sequence[Tensor]) -> None:
    """Count a write into each sum, as what added to it may be compiled, which does not."""
    increment_version([*sums, *(local_tensor(each) for each in sums if is_dtensor(each))])


def _lies(total: Tensor, lies: Sharding | None) -> bool:
    """Whether a sum lies over ranks as a gradient does, or both are of this rank alone."""
    if lies is None:
        return not is_dtensor(total)
    return is_dtensor(total) and Sharding.of(total) == lies


def _fits(total: Tensor, parameter: Tensor, spec: TensorSpec) -> bool:
    return (
        type(total) is Tensor
        and total.layout is torch.strided
        and total.dtype is spec.dtype
        and total.shape == spec.shape
        and total.stride() == parameter.stride()
        and total.device == spec.device
        and not total.requires_grad
        and not total.is_inference()
    )


def _apart(sums: Iterable[Tensor], read: Iterable[Tensor | None]) -> bool:
    """Whether no sum overlaps another one, or a tensor that is read."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in sums if t.nbytes)
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        return False
    starts = [start for start, _ in spans]
    for storage in (tensor.untyped_storage() for tensor in read if tensor is not None):
        begin = storage.data_ptr()
        before = bisect_left(starts, begin + storage.nbytes())
        if before and spans[before - 1][1] > begin:
            return False
    return True


class ShardedQueue(PendingQueue):
    """Pending microbatches of a sharded module.

    Args:
        delivery: computes their gradients.
        bound: how many may wait.
    """

    def __init__(self, delivery: ShardedDelivery, bound: PendingBound) -> None:
        super().__init__(delivery, bound)
        self._sharded = delivery.sharded
        delivery.queue = weakref.ref(self)

    def make_room(self) -> None:
        """Only where ``.grad`` was cleared: the last one that is left is what reduces."""
        self.sweep()

    def drop(self, parameters: Collection[int]) -> None:
        """Of microbatches whose W has run and that are not reduced yet, too."""
        super().drop(parameters)
        self._sharded.forget(parameters)


class ShardedDelivery(Delivery):
    """Accumulates weight gradients unreduced, and reduces them when nothing is pending any more.

    Args:
        accumulation: how gradients are added.
        sharded: the module.

    Attributes:
        queue: what this computes.
    """

    def __init__(self, accumulation: Accumulation, sharded: ShardedModule) -> None:
        super().__init__(accumulation)
        self.sharded = sharded
        self.queue: weakref.ref[ShardedQueue] | None = None

    def __call__(self, microbatches: Iterable[Sequence[PendingWork]]) -> None:
        queue = self.queue() if self.queue is not None else None
        ends = queue is not None and not queue.pending
        super().__call__(microbatches)
        if ends:
            self.sharded.reduce()

    def _deliver_through_engine(self, works: Sequence[PendingWork]) -> None:
        self._check(works)
        super()._deliver_through_engine(works)
        self.sharded.accumulate()

    def _add(self, works: Sequence[PendingWork], leaves: Leaves) -> None:
        self._check(works)
        super()._add(works, leaves)
        self.sharded.accumulate()

    def _check(self, works: Sequence[PendingWork]) -> None:
        """Refuse to run a W that reads parameters, as few do, on others than its forward's."""
        for work in works:
            if self._reads_parameters(work):
                self.sharded.check(work.writes)

    def _reads_parameters(self, work: PendingWork) -> bool:
        deferred = work.deferred
        return bool(deferred.state) or self.sharded.lies_in_parameters(deferred.tensors)
