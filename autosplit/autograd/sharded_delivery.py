"""``ShardedDelivery``: runs W of a sharded module, and has its gradients reduced."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import Accumulation
from autosplit.runtime.weight_slices import SlicedWeight
from autosplit.sharded.overlap import OverlappedReduction
from autosplit.torch_internals.autograd import (
    Leaves,
    add_gradients,
    has_accumulate_hooks,
    without_autocast,
)

from .deferred_backward import DeferredBackward
from .delivery import Delivery
from .pending_queue import PendingBound, PendingQueue

if TYPE_CHECKING:
    from autosplit.sharded.module import ShardedModule


class ShardedQueue(PendingQueue[DeferredBackward]):
    """Pending microbatches of a sharded module.

    Args:
        delivery: computes their gradients.
        bound: how many may wait.
    """

    def __init__(self, delivery: ShardedDelivery, bound: PendingBound) -> None:
        super().__init__(delivery.all, bound)
        self._sharded = delivery.sharded
        delivery.queue = weakref.ref(self)

    def make_room(self) -> None:
        """Nothing: the last one that is left is what reduces."""

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

    _reduced = False

    def __init__(self, accumulation: Accumulation, sharded: ShardedModule) -> None:
        super().__init__(accumulation)
        self.sharded = sharded
        self.queue: weakref.ref[ShardedQueue] | None = None
        self._counts: weakref.WeakKeyDictionary[SplitFunctions, int]
        self._counts = weakref.WeakKeyDictionary()

    def all(self, microbatches: Iterable[Sequence[DeferredBackward]]) -> None:
        given = list(microbatches)
        queue = self.queue() if self.queue is not None else None
        ends = queue is not None and not queue.pending
        last = given.pop() if ends and given and self._overlaps(given[-1]) else None
        super().all(given)
        if last is not None:
            self._reduce_beside(last[0])
        elif ends:
            self.sharded.reduce()

    def _overlaps(self, works: Sequence[DeferredBackward]) -> bool:
        """Whether gradients can be reduced while W of this microbatch computes others."""
        work = works[0]
        return (
            self._accumulation.exact
            and len(works) == 1
            and len(self.sharded.reduced_groups) > 1
            and not self._reads_parameters(work)
            and self._added_directly(works) is not None
            # They are called where a group is reduced, which may be another thread.
            and not has_accumulate_hooks(self.sharded.parameters)
        )

    def _reduce_beside(self, work: DeferredBackward) -> None:
        """The last microbatch: W in slices, and behind each the reduction of what is complete."""
        functions, state = work.functions, work.state
        names = functions.parameter_names
        weight = self._sliced(functions)
        with (
            torch.set_grad_enabled(False),
            without_autocast(),
            OverlappedReduction(self.sharded, [state[name] for name in names]) as reduction,
        ):
            early, borrowed = functions.early_parameters, functions.dependence.borrowed
            self._arrived(work, early, work.early, borrowed, reduction)
            deferred, count = work.deferred, len(weight.parameter_names)
            for index, late in enumerate(weight.parameter_names):
                found, deferred = functions.weight_slice(
                    count, index, deferred, None, self._accumulation
                )
                self._arrived(work, late, found, weight.borrowed(index), reduction)

    def _arrived(
        self,
        work: DeferredBackward,
        names: Sequence[str],
        gradients: Sequence[Tensor],
        borrowed: Collection[str],
        reduction: OverlappedReduction,
    ) -> None:
        parameters = [work.state[name] for name in names]
        if parameters:
            add_gradients(parameters, gradients, [name in borrowed for name in names])
        reduction.arrived(parameters)

    def _deliver_through_engine(self, works: Sequence[DeferredBackward]) -> None:
        self._check(works)
        super()._deliver_through_engine(works)
        self.sharded.accumulate()

    def _add(self, works: Sequence[DeferredBackward], leaves: Leaves) -> None:
        self._check(works)
        super()._add(works, leaves)
        self.sharded.accumulate()

    def _check(self, works: Sequence[DeferredBackward]) -> None:
        """Refuse to run a W that reads parameters, as few do, on others than its forward's."""
        for work in works:
            if self._reads_parameters(work):
                self.sharded.check(work.writes)

    def _reads_parameters(self, work: DeferredBackward) -> bool:
        deferred = work.deferred
        return bool(deferred.state) or self.sharded.lies_in_parameters(deferred.tensors)

    def _sliced(self, functions: SplitFunctions) -> SlicedWeight:
        """W in two slices a group, which do not end where groups do, or in as many as there are."""
        count = self._counts.get(functions, 2 * len(self.sharded.reduced_groups))
        while count > 1:
            with contextlib.suppress(SplitError):
                weight = functions.sliced(count)
                self._counts[functions] = count
                return weight
            count -= 1
        return functions.sliced(1)
