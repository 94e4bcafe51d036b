"""Accumulation of a stage's weight gradients into ``.grad``, as a backward of autograd would."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autosplit.autograd.delivery import inplace_sums, note_written
from autosplit.autograd.pending import PendingWork
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import Accumulation
from autosplit.runtime.in_flight import InFlightMicrobatch
from autosplit.runtime.residuals import Residuals, State
from autosplit.torch_internals.autograd import KnownLeaves, add_gradients

_SMALL = 2**20  # bytes of all weight gradients of a microbatch


class WeightGradients:
    """Runs I, W and B of a stage and adds the weight gradients to ``.grad``.

    Hooks fire once for each microbatch, as in a loop that calls ``backward()`` for each; where a
    parameter has one, autograd's engine hands the gradients over. Elsewhere the graph adds them
    itself, so that one gradient at a time is held, or, where they are small, they are added behind
    it all at once.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self.accumulation = accumulation
        self._leaves = KnownLeaves()
        self._large: weakref.WeakKeyDictionary[SplitFunctions, bool] = weakref.WeakKeyDictionary()

    def input(
        self, flight: InFlightMicrobatch, grads: list[Tensor | None], skipped: frozenset[str]
    ) -> tuple[list[Tensor | None], PendingWork]:
        """I: gradients of the inputs, and what is left for W. Empties ``grads``."""
        functions, saved, state = flight.functions, flight.residuals, flight.state
        target = self._target(functions, functions.early_parameters, state, skipped, saved)
        sums, how = target.sums, self.accumulation
        found, deferred, early = functions.backward_input(saved, grads, sums, how)
        target.add(early)
        return found, PendingWork(functions, deferred, state, skipped)

    def deferred(self, work: PendingWork) -> None:
        """W."""
        functions, how, deferred = work.graph, self.accumulation, work.deferred
        names = functions.late_parameters
        target = self._target(functions, names, work.state, work.skipped, deferred)
        target.add(functions.backward_weight(deferred, target.sums, how))

    def whole(
        self, flight: InFlightMicrobatch, grads: list[Tensor | None], skipped: frozenset[str]
    ) -> list[Tensor | None]:
        """B: gradients of the inputs. Empties ``grads``."""
        functions, saved, state = flight.functions, flight.residuals, flight.state
        target = self._target(functions, functions.parameter_names, state, skipped, saved)
        found, weights = functions.backward(saved, grads, target.sums, self.accumulation)
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
            sums = inplace_sums(functions, names, state, read.read)
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
        if not self.accumulation.exact:
            return True
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
            note_written(self.sums)
        elif self.direct:
            add_gradients([state[n] for n in names], found, [n in own for n in names])
        else:
            pairs = [(n, g) for n, g in zip(names, found, strict=True) if n not in self.skipped]
            pairs = [(n, g.clone() if n in own else g) for n, g in pairs if state[n].requires_grad]
            if pairs:
                torch.autograd.backward([state[n] for n, _ in pairs], [g for _, g in pairs])
