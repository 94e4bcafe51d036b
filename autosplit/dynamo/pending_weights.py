"""Pending weight gradients of compiled models: ``autosplit.backward_weight(model)``.

``torch.compile(model, backend="autosplit")`` leaves no object of ours in the user's hands, so
deferred work waits on the parameters that it is for.
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
from autosplit.torch_internals.autograd import UncachedLeaves
from autosplit.torch_internals.distributed import data_parallel, refuse_sharded, synchronises
from autosplit.torch_internals.state import distinct_storage_bytes

if TYPE_CHECKING:
    from .backend import DynamoGraph


@dataclasses.dataclass(eq=False)
class ForwardCall:
    """One forward call of the model, as the owner tells calls apart.

    Attributes:
        fused_backward: whether its backward is I and W in one.
        in_data_parallel: whether data parallelism counts how often the engine comes by a parameter.
        calls: how often it ran each graph.
        deferred: the parameters whose gradients W of these graphs computes.
    """

    fused_backward: bool = False
    in_data_parallel: bool = False
    calls: Counter[DynamoGraph] = dataclasses.field(default_factory=Counter)
    deferred: dict[nn.Parameter, None] = dataclasses.field(default_factory=dict)


class PendingOnParameters(PendingQueue):
    """Owner of one graph's deferred work, found by its parameters, as no model collects it."""

    def __init__(self, bound: PendingBound) -> None:
        super().__init__(Delivery(), bound)
        self._leaves = UncachedLeaves()
        self.anchor = WeightAnchor(self, leaves=self._leaves)  # Dynamo keeps it

    def name_of(self, parameter: nn.Parameter) -> None:
        """No name: parameters are known by Dynamo's source only."""

    def compiled(self, part: DynamoGraph) -> None:
        """Nothing: there is no report."""

    def entered(self, part: DynamoGraph, parameters: Sequence[nn.Parameter]) -> ForwardCall:
        """Microbatches are told apart by their backward alone."""
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
        # Dynamo keeps the graph, and this.
        work.state, work.leaves = weakref.WeakValueDictionary(work.state), None
        super().add(microbatch, work, moved=moved)


class Deferral:
    """Weight gradients that ``torch.compile(model, backend="autosplit")`` has deferred.

    The face is that of ``SplitModule``, lazy gradients included. One microbatch is what one
    ``backward()`` left.

    Args:
        model_or_parameters: the model, compiled or not, or some of its parameters.

    Raises:
        SplitError: it is something else.
        ShardedError: FSDP manages the model or a part of it.
    """

    def __init__(self, model_or_parameters: nn.Module | Tensor | Iterable[Tensor]) -> None:
        given = model_or_parameters
        if isinstance(given, Tensor):
            given = [given]
        if isinstance(given, nn.Module):
            refuse_sharded(given)  # some of its graphs never came to us
        self._parameters = list(given.parameters() if isinstance(given, nn.Module) else given)
        for parameter in self._parameters:
            if not isinstance(parameter, Tensor):
                raise SplitError(
                    f"expected a module or parameters, got a {type(parameter).__name__}"
                )

    @property
    def pending(self) -> int:
        """Microbatches whose weight gradients have not been computed."""
        return len(_microbatches(self._owners()))

    @property
    def pending_bytes(self) -> int:
        """Bytes of distinct storage that pending microbatches hold."""
        works = chain.from_iterable(owner.works() for owner in self._owners())
        return distinct_storage_bytes(tensor for work in works for tensor in work.tensors)

    def backward_weight(self, microbatches: int | None = None) -> None:
        """Compute pending weight gradients and accumulate them into ``.grad``.

        They are of backwards that were before any hook on the parameters: none fires. The weight
        gradients of one graph are computed together: asked for some parameters, this also delivers
        those of others that share a graph with them.

        Args:
            microbatches: how many, the oldest ``backward()`` first; all where None.

        Raises:
            SplitError: fewer than asked for are pending.
        """
        owners = self._owners()
        waiting = _microbatches(owners)
        bounds = [owner.bound for owner in owners] or [PendingBound(math.inf)]
        bound = max(bounds, key=lambda candidate: candidate.early)
        left = {*waiting[bound.count(microbatches, 0, len(waiting)) :]}
        for owner in owners:
            owner.compute(leave=len(left & owner.microbatches.keys()))

    def discard(self) -> None:
        """Forget what is pending, as ``SplitModule.discard`` does, for these parameters and others
        that share a graph with them.
        """
        for owner in self._owners():
            owner.discard()

    def _owners(self) -> list[PendingOnParameters]:
        """Owners of pending work for the parameters."""
        slots = [GradientSlot.of(parameter) for parameter in self._parameters]
        queues = dict.fromkeys(slot.queue for slot in slots if slot)
        owners = [queue for queue in queues if isinstance(queue, PendingOnParameters)]
        for owner in owners:
            owner.sweep()
        return owners


def _microbatches(owners: Iterable[PendingOnParameters]) -> list[Hashable]:
    """Backwards that left pending work, oldest first."""
    return sorted({number for owner in owners for number in owner.microbatches})  # type: ignore


def backward_weight(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor], microbatches: int | None = None
) -> None:
    """Compute the weight gradients that a model compiled with ``backend="autosplit"`` has
    deferred: ``Deferral(model_or_parameters).backward_weight(microbatches)``.

    Raises:
        SplitError: fewer microbatches than asked for are pending.
    """
    Deferral(model_or_parameters).backward_weight(microbatches)
