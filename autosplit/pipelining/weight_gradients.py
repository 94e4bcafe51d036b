"""Accumulation of a stage's weight gradients into ``.grad``, as a backward of autograd would."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from autosplit.autograd.pending import PendingWork
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.in_flight import InFlightMicrobatch
from autosplit.runtime.residuals import Residuals, State, TensorSpec
from autosplit.torch_internals.autograd import KnownLeaves, add_gradients
from autosplit.torch_internals.dtensor import Sharding, is_dtensor, local_tensor

_SMALL = 2**20  # bytes of all weight gradients of a microbatch


class WeightGradients:
    """Runs I, W and B of a stage and adds the weight gradients to ``.grad``.

    Hooks fire once for each microbatch, as in a loop that calls ``backward()`` for each; where a
    parameter has one, autograd's engine hands the gradients over. Elsewhere the graph adds them
    itself, so that one gradient at a time is held, or, where they are small, they are added behind
    it all at once.
    """

    def __init__(self) -> None:
        self._leaves = KnownLeaves()
        self._large: weakref.WeakKeyDictionary[SplitFunctions, bool] = weakref.WeakKeyDictionary()

    def input(
        self, flight: InFlightMicrobatch, grads: list[Tensor | None], skipped: frozenset[str]
    ) -> tuple[list[Tensor | None], PendingWork]:
        """I: gradients of the inputs, and what is left for W. Empties ``grads``."""
        functions, saved, state = flight.functions, flight.residuals, flight.state
        target = self._target(functions, functions.early_parameters, state, skipped, saved)
        found, deferred, early = functions.backward_input(saved, grads, target.sums)
        target.add(early)
        return found, PendingWork(functions, deferred, state, skipped)

    def deferred(self, work: PendingWork) -> None:
        """W."""
        functions, deferred = work.graph, work.deferred
        names = functions.late_parameters
        target = self._target(functions, names, work.state, work.skipped, deferred)
        target.add(functions.backward_weight(deferred, target.sums))

    def whole(
        self, flight: InFlightMicrobatch, grads: list[Tensor | None], skipped: frozenset[str]
    ) -> list[Tensor | None]:
        """B: gradients of the inputs. Empties ``grads``."""
        functions, saved, state = flight.functions, flight.residuals, flight.state
        target = self._target(functions, functions.parameter_names, state, skipped, saved)
        found, weights = functions.backward(saved, grads, target.sums)
        target.add(weights)
        return found

    def _target(
        self,
        functions: SplitFunctions,
        names: Sequence[str],
        state: State,
        skipped: Collection[str],
        read: Residuals,
    ) -> _Target:
        """Where the gradients of a graph go.

        Args:
            functions: the graph's.
            names: whose gradients it makes, in its order.
            state: has the parameters.
            skipped: those that get none.
            read: what the graph reads.
        """
        direct = not skipped and self._adds_directly(functions, state)
        sums = None
        if direct and names and self._adds_inside(functions):
            sums = _inplace_sums(functions, names, state, read.read)
        return _Target(names, state, skipped, functions.dependence.borrowed, direct, sums)

    def calls(self, functions: SplitFunctions, calls: Sequence[str]) -> Sequence[str]:
        """Of a step's calls those whose graphs differ."""
        return calls if self._adds_inside(functions) else [*dict.fromkeys(calls)]

    def _adds_directly(self, functions: SplitFunctions, state: State) -> bool:
        if not functions.dependence.dense:
            return False
        leaves = self._leaves.of(functions.parameter_names, state)
        return leaves.allows_direct_add() and not leaves.has_hooks()

    def _adds_inside(self, functions: SplitFunctions) -> bool:
        """Whether graphs add gradients themselves: small ones are added faster all at once."""
        if functions not in self._large:
            specs = functions.dependence.gradient_specs.values()
            bytes = sum(each.shape.numel() * each.dtype.itemsize for each in specs)
            self._large[functions] = bytes > _SMALL
        return self._large[functions]


class _Target(NamedTuple):
    """Where the gradients of one call of a graph go.

    Attributes:
        names: of the parameters, in the graph's order.
        state: has them.
        skipped: those that get none.
        borrowed: those whose gradient is not a tensor of its own.
        direct: whether adding is all that there is to do.
        sums: what the graph adds them into itself; None where it makes new ones.
    """

    names: Sequence[str]
    state: State
    skipped: Collection[str]
    borrowed: Collection[str]
    direct: bool
    sums: list[Tensor] | None

    def add(self, found: Sequence[Tensor]) -> None:
        """Add what the graph has made."""
        names, state, own = self.names, self.state, self.borrowed
        if self.sums is not None:
            _note_written(self.sums)
        elif self.direct:
            add_gradients([state[n] for n in names], found, [n in own for n in names])
        else:
            pairs = [(n, g) for n, g in zip(names, found, strict=True) if n not in self.skipped]
            pairs = [(n, g.clone() if n in own else g) for n, g in pairs if state[n].requires_grad]
            if pairs:
                torch.autograd.backward([state[n] for n, _ in pairs], [g for _, g in pairs])


def _inplace_sums(
    graph: SplitFunctions,
    names: Sequence[str],
    state: State,
    read: Iterable[Tensor | None],
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


def _note_written(sums: Sequence[Tensor]) -> None:
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
