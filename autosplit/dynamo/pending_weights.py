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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autosplit.autograd.delivery import Delivery
from autosplit.autograd.function import WeightAnchor
from autosplit.autograd.lazy_gradient import GradientSlot
from autosplit.autograd.pending import PendingQueue, PendingWork
from autosplit.autograd.pending_bound import PendingBound
from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import UncachedLeaves, at_end_of_backward
from autosplit.torch_internals.distributed import data_parallel, refuse_sharded, synchronises

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
    """Owner of one graph's pending work. ``backward_weight`` finds it through the
    graph's parameters.
    """

    def __init__(self, bound: PendingBound) -> None:
        super().__init__(Delivery(), bound)
        self._leaves = UncachedLeaves()
        self.anchor = WeightAnchor(  # Dynamo keeps it
            self, leaves=self._leaves, alternative="the model without torch.compile"
        )

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
                backward_weight(wrapper)
                return ForwardCall(True, True)
        fused_backward = torch.is_grad_enabled() and self._leaves.among(parameters).has_hooks()
        if fused_backward:
            backward_weight(parameters)
        self.make_room()
        return ForwardCall(fused_backward, wrapper is not None)

    def add(self, microbatch: Hashable, work: PendingWork, *, moved: bool = False) -> None:
        # Dynamo keeps the graph and this queue, which must not keep the parameters.
        work.state, work.leaves = weakref.WeakValueDictionary(work.state), None
        super().add(microbatch, work, moved=moved)
        if work.graph.sums and not work.parameters:  # no gradient would lead to the sums that wait
            at_end_of_backward(self.compute)


def backward_weight(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor], microbatches: int | None = None
) -> None:
    """Compute the weight gradients that ``torch.compile(model, backend="autosplit")`` has deferred,
    and accumulate them into ``.grad``.

    Until then, ``.grad`` is a lazy gradient, as in ``SplitModule``. One microbatch is the pending
    work of one ``backward()``. No hook on a parameter fires, because no parameter had a hook when
    its backward ran. The weight gradients of one graph are computed together, even if some of its
    parameters are not among the given ones.

    Args:
        model_or_parameters: the model, compiled or not, or some of its parameters.
        microbatches: number of microbatches, oldest ``backward()`` first; None for all.

    Raises:
        SplitError: fewer microbatches than requested are pending; or the argument is neither a
            module nor parameters.
        ShardedError: FSDP manages the model or a part of it.
    """
    queues = pending_queues(model_or_parameters)
    numbers: set[Any] = {number for queue in queues for number in queue.microbatches}
    oldest_first = sorted(numbers)
    bounds = [queue.bound for queue in queues] or [PendingBound(math.inf)]
    bound = max(bounds, key=lambda candidate: candidate.early)
    left = set[Any]()
    if microbatches is not None:
        left.update(oldest_first[bound.check_request(microbatches, len(numbers)) :])
    for queue in queues:
        queue.compute(leave=len(left & queue.microbatches.keys()))


def pending_queues(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor],
) -> list[PendingOnParameters]:
    """The queues with pending work for a compiled model or some of its parameters.

    Raises:
        SplitError: the argument is neither a module nor parameters.
        ShardedError: FSDP manages the model or a part of it.
    """
    parameters: Iterable[Tensor]
    if isinstance(model_or_parameters, nn.Module):
        refuse_sharded(model_or_parameters)  # some of its graphs were never split
        parameters = model_or_parameters.parameters()
    elif isinstance(model_or_parameters, Tensor):
        parameters = [model_or_parameters]
    else:
        parameters = model_or_parameters
    queues: dict[PendingQueue, None] = {}
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise SplitError(
                "backward_weight: expected a module or parameters, got a "
                f"{type(parameter).__name__}"
            )
        if (slot := GradientSlot.of(parameter)) is not None:
            queues[slot.queue] = None
    owners = [queue for queue in queues if isinstance(queue, PendingOnParameters)]
    for owner in owners:
        owner.sweep()
    return owners
