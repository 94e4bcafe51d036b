"""Pending weight gradients of compiled models: ``autosplit.backward_weight(model)``.

``torch.compile(model, backend="autosplit")`` returns no object of autosplit. So pending work is
found through the parameters, whose lazy gradients refer to the work.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autosplit.autograd.delivery import Delivery
from autosplit.autograd.function import WeightAnchor
from autosplit.autograd.lazy_gradient import GradientSlot
from autosplit.autograd.pending import PendingBound, PendingQueue, PendingWork
from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import UncachedLeaves, at_end_of_backward
from autosplit.torch_internals.distributed import data_parallel, refuse_sharded, synchronises
from autosplit.torch_internals.state import distinct_storage_bytes

if TYPE_CHECKING:
    from .backend import DynamoGraph


@dataclasses.dataclass(eq=False)
class ForwardCall:
    """One forward call of the model; for graphs without a ``PartialModel``, of one graph.

    Attributes:
        fused_backward: whether the call's backward is I and W in one.
        in_data_parallel: whether a data-parallel wrapper of the model counts the gradients that
            each parameter gets in the call's backward.
        calls: number of runs of each graph.
        deferred: the parameters whose gradients W of the called graphs computes.
    """

    fused_backward: bool = False
    in_data_parallel: bool = False
    calls: Counter[DynamoGraph] = dataclasses.field(default_factory=Counter)
    deferred: dict[nn.Parameter, None] = dataclasses.field(default_factory=dict)


class PendingOnParameters(PendingQueue):
    """Owner of one graph's pending work. ``Deferral`` finds it through the graph's parameters."""

    def __init__(self, bound: PendingBound) -> None:
        super().__init__(Delivery(), bound)
        self._leaves = UncachedLeaves()
        self.anchor = WeightAnchor(self, leaves=self._leaves)  # Dynamo keeps it

    def name_of(self, parameter: nn.Parameter) -> None:
        """Return None: graphs name parameters by Dynamo's expressions."""

    def add_graph(self, part: DynamoGraph) -> None:
        """Do nothing, because there is no report for which graphs would be recorded."""

    def enter_graph(self, part: DynamoGraph, parameters: Sequence[nn.Parameter]) -> ForwardCall:
        """Return a new ``ForwardCall`` for each call of the graph. Only the backward shows which
        calls belong to one microbatch.
        """
        wrapper = data_parallel()
        if wrapper is not None:
            self.delivery.has_observers = True
            if synchronises():
                Deferral(wrapper).backward_weight()
                return ForwardCall(True, True)
        fused_backward = torch.is_grad_enabled() and self._leaves.among(parameters).has_hooks()
        if fused_backward:
            Deferral(parameters).backward_weight()
        self.make_room()
        return ForwardCall(fused_backward, wrapper is not None)

    def add(self, microbatch: Hashable, work: PendingWork, *, moved: bool = False) -> None:
        # Dynamo keeps the graph and this queue, which must not keep the parameters.
        work.state, work.leaves = weakref.WeakValueDictionary(work.state), None
        super().add(microbatch, work, moved=moved)
        if work.graph.sums and not work.parameters:  # no gradient would lead to the sums that wait
            at_end_of_backward(self.compute)


class Deferral:
    """Weight gradients that ``torch.compile(model, backend="autosplit")`` has deferred.

    The methods are as in ``SplitModule``, and ``.grad`` is a lazy gradient, too. One microbatch is
    the pending work of one ``backward()``.

    Args:
        model_or_parameters: the model, compiled or not, or some of its parameters.

    Raises:
        SplitError: the argument is neither a module nor parameters.
        ShardedError: FSDP manages the model or a part of it.
    """

    def __init__(self, model_or_parameters: nn.Module | Tensor | Iterable[Tensor]) -> None:
        parameters: Iterable[Tensor]
        if isinstance(model_or_parameters, nn.Module):
            refuse_sharded(model_or_parameters)  # some of its graphs were never split
            parameters = model_or_parameters.parameters()
        elif isinstance(model_or_parameters, Tensor):
            parameters = [model_or_parameters]
        else:
            parameters = model_or_parameters
        self._parameters = list(parameters)
        for parameter in self._parameters:
            if not isinstance(parameter, Tensor):
                raise SplitError(
                    "backward_weight and discard: expected a module or parameters, got a "
                    f"{type(parameter).__name__}"
                )

    @property
    def pending(self) -> int:
        """Number of microbatches with pending weight gradients."""
        return len(_microbatches(self._owners()))

    @property
    def pending_bytes(self) -> int:
        """Bytes of distinct storage that pending microbatches keep alive."""
        works = chain.from_iterable(owner.works() for owner in self._owners())
        return distinct_storage_bytes(tensor for work in works for tensor in work.tensors)

    def backward_weight(self, microbatches: int | None = None) -> None:
        """Compute pending weight gradients and accumulate them into ``.grad``.

        No hook on a parameter fires, because no parameter had a hook when its backward ran. The
        weight gradients of one graph are computed together, even if some of its parameters are not
        among this object's.

        Args:
            microbatches: number of microbatches, oldest ``backward()`` first; None for all.

        Raises:
            SplitError: fewer microbatches than requested are pending.
        """
        owners = self._owners()
        waiting = _microbatches(owners)
        bounds = [owner.bound for owner in owners] or [PendingBound(math.inf)]
        bound = max(bounds, key=lambda candidate: candidate.early)
        left = {*waiting[bound.count(microbatches, 0, len(waiting)) :]}
        for owner in owners:
            owner.compute(leave=len(left & owner.microbatches.keys()))

    def discard(self) -> None:
        """Discard pending work, as ``SplitModule.discard`` does.

        Work for parameters that share a graph with this object's parameters is discarded, too.
        """
        for owner in self._owners():
            owner.discard_all()

    def _owners(self) -> list[PendingOnParameters]:
        """The queues with pending work for this object's parameters."""
        slots = [GradientSlot.of(parameter) for parameter in self._parameters]
        queues = dict.fromkeys(slot.queue for slot in slots if slot)
        owners = [queue for queue in queues if isinstance(queue, PendingOnParameters)]
        for owner in owners:
            owner.sweep()
        return owners


def _microbatches(owners: Iterable[PendingOnParameters]) -> list[Hashable]:
    """Keys of the microbatches with pending work, oldest first."""
    return sorted({number for owner in owners for number in owner.microbatches})  # type: ignore


def backward_weight(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor], microbatches: int | None = None
) -> None:
    """Compute the weight gradients that a compiled model has deferred.

    The model is compiled with ``backend="autosplit"``. This calls
    ``Deferral(model_or_parameters).backward_weight(microbatches)``.

    Raises:
        SplitError: fewer microbatches than requested are pending.
    """
    Deferral(model_or_parameters).backward_weight(microbatches)
