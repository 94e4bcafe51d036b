"""``Delivery``: runs W of pending microbatches and adds the gradients to their parameters'.

As autograd's engine would. ``ShardedDelivery``: of a module that ``fully_shard`` has sharded, whose
gradients are then reduced.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from autosplit.torch_internals.autograd import (
    add_gradient,
    add_gradients,
    at_end_of_backward,
    visit_leaves,
    without_autocast,
    without_grad,
)

from .lazy_gradient import _SLOT_LOCK, GradientSlot
from .pending import PendingBound, PendingQueue, PendingWork

if TYPE_CHECKING:
    from autosplit.sharded import ShardedModule


class Delivery:
    """Computes weight gradients and adds them up as an ordinary ``backward()`` would.

    Hooks on parameters do not fire: a parameter had none when the backward ran, which would have
    computed its gradient itself.

    Attributes:
        has_observers: whether somebody may wait for autograd's engine to come by the parameters:
            data parallelism, once a forward was inside of it.
    """

    def __init__(self) -> None:
        self.has_observers = False

    def deliver(
        self, microbatches: Sequence[Sequence[PendingWork]], slots: Sequence[GradientSlot]
    ) -> None:
        """Compute and add what some ``backward()`` left, in their order.

        Args:
            microbatches: the work.
            slots: to which gradients are added before they are in ``.grad``; those of other
                parameters are added there.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        with without_grad(), without_autocast():
            for works in microbatches:
                self._add(works, slots)

    def announce(self, microbatches: Iterable[Sequence[PendingWork]]) -> None:
        """Have autograd's engine come by the nodes of the parameters, once for each microbatch,
        where somebody may wait for that. Who has this computed in a backward may hold a lock that
        it takes there, as the reducer of data parallelism does: then that ends its step first.
        """
        for works in microbatches if self.has_observers else ():
            leaves = {id(leaf): leaf for work in works for _, leaf in work.named_leaves()}
            at_end_of_backward(partial(at_end_of_backward, partial(visit_leaves, leaves)))

    def _add(self, works: Sequence[PendingWork], slots: Sequence[GradientSlot]) -> None:
        """What one ``backward()`` left. Several are of one graph's calls, or of several graphs: of
        a parameter that they share autograd adds up what comes, in their order, before it adds that
        to ``.grad``.
        """
        work = works[0]
        leaves, homes = work.leaves, work.slots
        if len(works) > 1 or work.skipped:
            leaves = None
        if leaves is not None and len({*homes}) == len(homes):  # as a rule
            grads = work.gradients()
            with _SLOT_LOCK:
                add_gradients(leaves, grads, work.graph.borrowed, homes)
            return
        gradients: dict[int, tuple[Tensor, Tensor, bool]] = {}
        for work in works:
            work_grads = work.gradients()
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
        growing = {slot.key: slot for slot in slots}
        with _SLOT_LOCK:
            for leaf, grad, copied in gradients.values():
                add_gradient(leaf, growing.get(id(leaf), leaf), grad, copied)


def weight_gradients(work: PendingWork) -> list[Tensor | None]:
    """A gradient for each of ``parameter_names``, to be handed to autograd: None where there is
    none, and each a tensor of its own.
    """
    graph = work.graph
    with without_autocast():
        named = zip(graph.parameter_names, work.gradients(), graph.borrowed, strict=True)
    return [None if n in work.skipped else g.clone() if copied else g for n, g, copied in named]


class ShardedQueue(PendingQueue):
    """Pending microbatches of a sharded module.

    Args:
        delivery: computes their gradients.
        bound: how many may wait.
    """

    shares = False

    def __init__(self, delivery: ShardedDelivery, bound: PendingBound) -> None:
        super().__init__(delivery, bound)
        self._sharded = delivery.sharded
        delivery.queue = weakref.ref(self)

    def __del__(self) -> None:
        """Nothing: without the module there is nothing that reduces."""

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
        sharded: the module.

    Attributes:
        queue: what this computes.
    """

    def __init__(self, sharded: ShardedModule) -> None:
        super().__init__()
        self.sharded = sharded
        self.queue: weakref.ref[ShardedQueue] | None = None

    def deliver(
        self, microbatches: Sequence[Sequence[PendingWork]], slots: Sequence[GradientSlot]
    ) -> None:
        queue = self.queue() if self.queue is not None else None
        ends = queue is not None and not queue.pending
        super().deliver(microbatches, slots)
        if ends:
            with _sums_in_grad(slots):
                self.sharded.reduce()

    def _add(self, works: Sequence[PendingWork], slots: Sequence[GradientSlot]) -> None:
        for work in works:
            # Few Ws read parameters: not others than their forward's.
            if self._reads_parameters(work):
                self.sharded.check(work.writes)
        super()._add(works, slots)
        self.sharded.accumulate()

    def _reads_parameters(self, work: PendingWork) -> bool:
        deferred = work.deferred
        return bool(deferred.state) or self.sharded.shares_parameter_memory(deferred.tensors)


@contextlib.contextmanager
def _sums_in_grad(slots: Collection[GradientSlot]) -> Iterator[None]:
    """``.grad`` is the sum inside, for what reads and sets that itself."""
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
