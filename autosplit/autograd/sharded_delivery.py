"""``ShardedDelivery``: runs W of a sharded module, and has its gradients reduced."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from autosplit.runtime.gradient_accumulation import Accumulation
from autosplit.torch_internals.accumulate_grad import Leaves

from .deferred_backward import DeferredBackward
from .delivery import Delivery
from .pending_queue import PendingQueue

if TYPE_CHECKING:
    from autosplit.sharded.module import ShardedModule


class ShardedQueue(PendingQueue[DeferredBackward]):
    """Pending microbatches of a sharded module.

    Args:
        delivery: computes their gradients.
    """

    def __init__(self, delivery: ShardedDelivery) -> None:
        super().__init__(delivery.all)
        self._sharded = delivery.sharded
        delivery.queue = weakref.ref(self)

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

    def all(self, microbatches: Iterable[Sequence[DeferredBackward]]) -> None:
        super().all(microbatches)
        queue = self.queue() if self.queue is not None else None
        if queue is not None and not queue.pending:
            self.sharded.reduce()

    def _deliver_through_engine(self, works: Sequence[DeferredBackward]) -> None:
        with self._gathered(works):
            super()._deliver_through_engine(works)
        self.sharded.accumulate()

    def _add(self, works: Sequence[DeferredBackward], leaves: Leaves) -> None:
        with self._gathered(works):
            super()._add(works, leaves)
        self.sharded.accumulate()

    def _gathered(self, works: Sequence[DeferredBackward]) -> AbstractContextManager[None]:
        """Parameters gathered where W reads some; as a rule it reads none."""
        for work in works:
            if work.deferred.state:
                return self.sharded.backward(work.writes)
        return contextlib.nullcontext()
