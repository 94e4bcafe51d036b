"""``OverlappedReduction``: parameter groups are reduced while weight gradients are computed.

``ShardedDelivery``: runs W of a sharded module, and has its gradients reduced.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from autosplit.autograd.delivery import Delivery
from autosplit.autograd.pending import PendingBound, PendingQueue, PendingWork
from autosplit.errors import SplitError
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import Accumulation
from autosplit.runtime.weight_slices import SlicedWeight
from autosplit.sharded.module import ShardedModule
from autosplit.torch_internals.autograd import (
    Leaves,
    add_gradients,
    has_accumulate_hooks,
    without_autocast,
)
from autosplit.torch_internals.fsdp import ParameterGroup


class OverlappedReduction:
    """Reduces each group as soon as the last of its gradients is there, the groups in one order on
    all ranks: one that is complete too early for that order waits for those before it.

    On an accelerator FSDP reduces on a stream of its own. On a CPU a thread waits for the other
    ranks that hold the shards; nothing else may communicate with these meanwhile.

    Args:
        sharded: the module.
        gathered: the parameters, gathered, whose gradients are to come.
    """

    def __init__(self, sharded: ShardedModule, gathered: Iterable[Tensor]) -> None:
        self._sharded = sharded
        awaited = {id(parameter) for parameter in gathered}
        self._groups = sharded.reduced_groups
        self._missing = [awaited & {id(whole) for _, whole in g.pairs} for g in self._groups]
        self._begun: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1) if sharded.blocks else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Reduce what is left, and wait; after an error only wait."""
        if error is None:
            for missing in self._missing:
                missing.clear()
            self._start()
        if self._thread is not None:
            self._thread.shutdown()
        for each in self._begun:
            if error is None or each.exception() is None:
                each.result()
        if error is None:
            self._sharded.finish_reduce()

    def arrived(self, gathered: Iterable[Tensor]) -> None:
        """The gradients of these parameters are in ``.grad``."""
        keys = {id(parameter) for parameter in gathered}
        for missing in self._missing:
            missing -= keys
        self._start()

    def _start(self) -> None:
        while len(self._begun) < len(self._groups) and not self._missing[len(self._begun)]:
            group = self._groups[len(self._begun)]
            group.lay_gradients_out()
            if self._thread is None:
                future: Future[None] = Future()
                _reduce(group)
                future.set_result(None)
            else:
                future = self._thread.submit(_reduce, group)
            self._begun.append(future)


def _reduce(group: ParameterGroup) -> None:
    group.accumulate()
    if group.unreduced:
        group.start_reduce()


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

    def __init__(self, accumulation: Accumulation, sharded: ShardedModule) -> None:
        super().__init__(accumulation)
        self.sharded = sharded
        self.queue: weakref.ref[ShardedQueue] | None = None
        self._counts: weakref.WeakKeyDictionary[SplitFunctions, int]
        self._counts = weakref.WeakKeyDictionary()

    def __call__(self, microbatches: Iterable[Sequence[PendingWork]]) -> None:
        given = list(microbatches)
        queue = self.queue() if self.queue is not None else None
        ends = queue is not None and not queue.pending
        last = given.pop() if ends and given and self._overlaps(given[-1]) else None
        super().__call__(given)
        if last is not None:
            self._reduce_beside(last[0])
        elif ends:
            self.sharded.reduce()

    def _overlaps(self, works: Sequence[PendingWork]) -> bool:
        """Whether gradients can be reduced while W of this microbatch computes others."""
        work = works[0]
        return (
            self.accumulation.exact
            and len(works) == 1
            and len(self.sharded.reduced_groups) > 1
            and not self._reads_parameters(work)
            and self.added_directly(works) is not None
            # They are called where a group is reduced, which may be another thread.
            and not has_accumulate_hooks(self.sharded.parameters)
        )

    def _reduce_beside(self, work: PendingWork) -> None:
        """The last microbatch: W in slices, and behind each the reduction of what is complete."""
        functions, state = work.graph, work.state
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
                    count, index, deferred, None, self.accumulation
                )
                self._arrived(work, late, found, weight.borrowed(index), reduction)

    def _arrived(
        self,
        work: PendingWork,
        names: Sequence[str],
        gradients: Sequence[Tensor],
        borrowed: Collection[str],
        reduction: OverlappedReduction,
    ) -> None:
        parameters = [work.state[name] for name in names]
        if parameters:
            add_gradients(parameters, gradients, [name in borrowed for name in names])
        reduction.arrived(parameters)

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
