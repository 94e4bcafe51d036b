"""Run W of pending microbatches, and add the gradients to ``.grad`` as autograd's engine would.

``ShardedDelivery`` does this for a module of ``fully_shard``, and then reduces the gradients.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import TYPE_CHECKING

from torch import Tensor

from autosplit.torch_internals.autograd import (
    WithoutAutograd,
    at_end_of_backward,
    checks_nan,
    visit_leaves,
    without_autocast,
)
from autosplit.torch_internals.gradients import add_gradient, add_gradients

from .lazy_gradient import _SLOT_LOCK, GradientSlot
from .pending import PendingQueue, PendingWork
from .pending_bound import PendingBound

if TYPE_CHECKING:
    from autosplit.sharded import ShardedModule


class Delivery:
    """Computes weight gradients and accumulates them as an ordinary ``backward()`` would.

    No hook on a parameter fires, because no parameter had a hook when the backward ran. With a
    hook, the backward computes weight gradients itself.

    Attributes:
        has_observers: whether an observer may wait for autograd's engine to visit the parameters.
            Data parallelism is an observer once it has wrapped a forward.
    """

    def __init__(self) -> None:
        self.has_observers = False

    def deliver(
        self, microbatches: Sequence[Sequence[PendingWork]], slots: Sequence[GradientSlot]
    ) -> None:
        """Compute and accumulate the gradients of several microbatches, in their order.

        Args:
            microbatches: the pending work of each microbatch.
            slots: the slots into which gradients are added until they replace the lazy gradients.
                Gradients of parameters without a slot are added to ``.grad``.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        run: list[Sequence[PendingWork]] = []
        with WithoutAutograd():
            for works in microbatches:
                if run and not self._sums_together(run[0], works):
                    self._add_run(run, slots)
                    run = []
                run.append(works)
            if run:
                self._add_run(run, slots)

    def _sums_together(self, first: Sequence[PendingWork], other: Sequence[PendingWork]) -> bool:
        """Whether the gradients of two microbatches may be summed before the sum is added to
        ``.grad``.
        """
        if len(first) > 1 or len(other) > 1 or checks_nan():
            return False
        (a,), (b,) = first, other
        graph = a.graph
        if graph is not b.graph or not graph.sums_microbatches or graph.early_parameters:
            return False
        if a.leaves is None or b.leaves is None or a.skipped or b.skipped:
            return False
        if len({*a.slots}) < len(a.slots):  # a parameter has two names
            return False
        same_state = all(map(is_, a.deferred.record.state, b.deferred.record.state))
        return same_state and all(map(is_, a.leaves, b.leaves))

    def _add_run(self, run: Sequence[Sequence[PendingWork]], slots: Sequence[GradientSlot]) -> None:
        """Compute and accumulate the gradients of microbatches that are summed together."""
        if len(run) == 1:
            self._add(run[0], slots)
            return
        (work,) = run[0]
        sums = work.graph.sum_weights([works[0].deferred for works in run])
        with _SLOT_LOCK:
            add_gradients(work.leaves or (), sums, [False] * len(sums), work.slots)

    def notify_observers(self, microbatches: Iterable[Sequence[PendingWork]]) -> None:
        """Make autograd's engine visit the autograd nodes of the parameters, once for each
        microbatch.

        Do nothing without observers. Inside a backward the visit waits for the backward's end,
        because the caller may hold a lock that the visit needs, such as the lock of data
        parallelism's reducer.
        """
        for works in microbatches if self.has_observers else ():
            leaves = {id(leaf): leaf for work in works for _, leaf in work.named_leaves()}
            at_end_of_backward(partial(at_end_of_backward, partial(visit_leaves, leaves)))

    def _add(self, works: Sequence[PendingWork], slots: Sequence[GradientSlot]) -> None:
        """Compute and accumulate the gradients of one microbatch.

        There are several works if the microbatch called several graphs, or one graph several times.
        The gradients that several works have for one parameter are first summed in order. The sum
        is then added to ``.grad``, as autograd does.
        """
        work = works[0]
        leaves, homes = work.leaves, work.slots
        if len(works) > 1 or work.skipped:
            leaves = None
        if leaves is not None and len({*homes}) == len(homes):  # the common case
            grads = work.compute_gradients()
            with _SLOT_LOCK:
                add_gradients(leaves, grads, work.graph.borrowed, homes)
            return
        gradients = microbatch_gradients(works)
        growing = {slot.key: slot for slot in slots}
        with _SLOT_LOCK:
            for leaf, grad, copied in gradients.values():
                add_gradient(leaf, growing.get(id(leaf), leaf), grad, copied)


def microbatch_gradients(works: Iterable[PendingWork]) -> dict[int, tuple[Tensor, Tensor, bool]]:
    """Run W of one microbatch's works, and sum the gradients of each parameter.

    Returns:
        maps the ``id`` of a parameter to (parameter, gradient, whether the gradient shares memory).
    """
    gradients: dict[int, tuple[Tensor, Tensor, bool]] = {}
    for work in works:
        work_grads = work.compute_gradients()
        names, borrowed = work.graph.parameter_names, work.graph.dependence.borrowed
        for name, grad in zip(names, work_grads, strict=True):
            leaf = None if name in work.skipped else work.state.get(name)
            if leaf is None:
                continue
            if id(leaf) in gradients:
                partial_sum = gradients[id(leaf)][1]
                total = grad + partial_sum if partial_sum.is_sparse else partial_sum + grad
                gradients[id(leaf)] = leaf, total, False
            else:
                gradients[id(leaf)] = leaf, grad, name in borrowed
    return gradients


def weight_gradients(work: PendingWork) -> list[Tensor | None]:
    """Run W and return a gradient for each of ``parameter_names``, for autograd to accumulate.

    Returns:
        gradients that share no memory with one another; None for skipped parameters.
    """
    graph = work.graph
    with without_autocast():
        named = zip(graph.parameter_names, work.compute_gradients(), graph.borrowed, strict=True)
    return [None if n in work.skipped else g.clone() if copied else g for n, g, copied in named]


class ShardedQueue(PendingQueue):
    """The queue of pending microbatches of a module of ``fully_shard``.

    Args:
        delivery: runs W and reduces the gradients.
        bound: limits the number of pending microbatches.
    """

    shares = False

    def __init__(self, delivery: ShardedDelivery, bound: PendingBound) -> None:
        super().__init__(delivery, bound)
        self._sharded = delivery.sharded
        delivery.queue = weakref.ref(self)

    def __del__(self) -> None:
        """Drop pending gradients together with the module. Without the module, nothing can reduce
        them.
        """

    def make_room(self) -> None:
        """Drop pending microbatches whose ``.grad`` was cleared; compute none.

        Gradients are reduced after the last pending microbatch, so no microbatch may be computed
        early.
        """
        self.sweep()

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the gradients of parameters, including gradients that are computed but not reduced
        yet.
        """
        super().drop(parameters)
        self._sharded.forget(parameters)


class ShardedDelivery(Delivery):
    """Accumulates unreduced weight gradients, and reduces them after the last pending microbatch.

    Args:
        sharded: the sharded module.

    Attributes:
        sharded: as passed.
        queue: the queue of pending microbatches.
    """

    def __init__(self, sharded: ShardedModule) -> None:
        super().__init__()
        self.sharded = sharded
        self.queue: weakref.ref[ShardedQueue] | None = None

    def deliver(
        self, microbatches: Sequence[Sequence[PendingWork]], slots: Sequence[GradientSlot]
    ) -> None:
        queue = self.queue() if self.queue is not None else None
        ends = queue is not None and not queue.pending_count
        super().deliver(microbatches, slots)
        if ends:
            with _sums_in_grad(slots):
                self.sharded.reduce()

    def _sums_together(self, first: Sequence[PendingWork], other: Sequence[PendingWork]) -> bool:
        return False  # unreduced gradients are moved after each microbatch

    def _add(self, works: Sequence[PendingWork], slots: Sequence[GradientSlot]) -> None:
        for work in works:
            # If W reads parameters, they must have the values that the forward read.
            if self._reads_parameters(work):
                self.sharded.check_writes(work.writes)
        super()._add(works, slots)
        self.sharded.accumulate()

    def _reads_parameters(self, work: PendingWork) -> bool:
        deferred = work.deferred
        return bool(deferred.record.state) or self.sharded.shares_parameter_memory(deferred.tensors)


@contextlib.contextmanager
def _sums_in_grad(slots: Collection[GradientSlot]) -> Iterator[None]:
    """Context in which the sums of the slots are in ``.grad``, which FSDP reads and sets."""
    slot_parameters = [(slot, slot.parameter()) for slot in slots]
    swapped = [
        (slot, parameter, parameter.grad)
        for slot, parameter in slot_parameters
        if parameter is not None
    ]
    for slot, parameter, _ in swapped:
        parameter.grad = slot.grad
    try:
        yield
    finally:
        for slot, parameter, original_grad in swapped:
            slot.grad, parameter.grad = parameter.grad, original_grad
