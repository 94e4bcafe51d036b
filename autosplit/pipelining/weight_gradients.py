"""Accumulation of a stage's weight gradients into ``.grad``, as a backward of autograd would."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autosplit.autograd.inplace_accumulation import inplace_sums, note_written
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import Accumulation
from autosplit.runtime.in_flight import InFlightMicrobatch
from autosplit.runtime.residuals import Residuals, State
from autosplit.torch_internals.autograd import Leaves, add_gradients

Compute = Callable[[Sequence[Tensor] | None], Sequence[Tensor]]
"""Runs a graph: gradients, added into what it is given."""


class DeferredWeights(NamedTuple):
    """What I left of a microbatch for W.

    Attributes:
        flight: its graphs, what I deferred, and parameters and buffers of its forward.
        skipped: parameters that get no gradient, because no output that depends on them has one.
    """

    flight: InFlightMicrobatch
    skipped: frozenset[str]


class WeightGradients:
    """Runs I, W and B of a stage and adds the weight gradients to ``.grad``.

    Hooks fire once for each microbatch, as in a loop that calls ``backward()`` for each; where a
    parameter has one, autograd's engine hands the gradients over. Elsewhere the graph adds them
    itself, so that one gradient at a time is held, or they are added behind it.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self.accumulation = accumulation
        self._leaves: weakref.WeakKeyDictionary[SplitFunctions, Leaves]
        self._leaves = weakref.WeakKeyDictionary()

    @property
    def joins(self) -> bool:
        """Whether Ws that follow each other are one call."""
        return self.accumulation.concatenated

    def input(
        self, flight: InFlightMicrobatch, grads: list[Tensor | None], skipped: frozenset[str]
    ) -> tuple[list[Tensor | None], DeferredWeights]:
        """I: gradients of the inputs, and what is left for W. Empties ``grads``."""
        functions, saved, state = flight.functions, flight.residuals, flight.state
        kept: list[Any] = []

        def compute(sums: Sequence[Tensor] | None) -> Sequence[Tensor]:
            found, deferred, early = functions.backward_input(saved, grads, sums, self.accumulation)
            kept.extend((found, deferred))
            return early

        names = functions.early_parameters
        self._add(flight, names, skipped, lambda: saved.read, compute)
        found, deferred = kept
        return found, DeferredWeights(InFlightMicrobatch(functions, deferred, state), skipped)

    def deferred(self, works: Sequence[DeferredWeights]) -> None:
        """W of some microbatches, in one call where they are to be one and can."""
        for group in self._groups(works):
            flight, skipped = group[0]
            functions = flight.functions
            residuals = [work.flight.residuals for work in group]
            compute = partial(_weights, functions, residuals, self.accumulation)
            names = functions.late_parameters
            self._add(flight, names, skipped, partial(_read, residuals), compute)

    def whole(
        self,
        flight: InFlightMicrobatch,
        grads: list[Tensor | None],
        skipped: frozenset[str],
    ) -> list[Tensor | None]:
        """B: gradients of the inputs. Empties ``grads``."""
        functions, saved = flight.functions, flight.residuals
        found: list[Tensor | None] = []

        def compute(sums: Sequence[Tensor] | None) -> Sequence[Tensor]:
            made, weights = functions.backward(saved, grads, sums, self.accumulation)
            found.extend(made)
            return weights

        names = functions.parameter_names
        self._add(flight, names, skipped, lambda: saved.read, compute)
        return found

    def _groups(self, works: Sequence[DeferredWeights]) -> Iterator[list[DeferredWeights]]:
        group: list[DeferredWeights] = []
        for work in works:
            if group and not _fit(group[0], work):
                yield group
                group = []
            group.append(work)
        if group:
            yield group

    def _add(
        self,
        flight: InFlightMicrobatch,
        names: Sequence[str],
        skipped: Collection[str],
        read: Callable[[], Iterable[Tensor | None]],
        compute: Compute,
    ) -> None:
        """Run a graph and add what it makes.

        Args:
            flight: whose graph.
            names: whose gradients it makes, in its order.
            skipped: parameters that get none.
            read: what the graph reads.
            compute: runs it.
        """
        functions, state = flight.functions, flight.state
        direct = not skipped and self._adds_directly(functions, state)
        if direct and names:
            sums = self._sums(functions, state, names, read)
            if sums is not None:
                compute(sums)
                note_written(sums)
                return
        found = compute(None)
        wanted = [
            (state[name], gradient, name in functions.dependence.borrowed)
            for name, gradient in zip(names, found, strict=True)
            if name not in skipped and state[name].requires_grad
        ]
        if not wanted:
            return
        parameters, gradients, borrowed = map(list, zip(*wanted, strict=True))
        del found, wanted
        if direct:
            add_gradients(parameters, gradients, borrowed)
            return
        given = [g.clone() if b else g for g, b in zip(gradients, borrowed, strict=True)]
        del gradients
        torch.autograd.backward(parameters, given)

    def _sums(
        self,
        functions: SplitFunctions,
        state: State,
        names: Sequence[str],
        read: Callable[[], Iterable[Tensor | None]],
    ) -> list[Tensor] | None:
        specs, lying = functions.dependence.gradient_specs, functions.gradient_shardings
        return inplace_sums(
            [state[name] for name in names],
            [specs[name] for name in names],
            [lying.get(name) for name in names],
            read(),
        )

    def _adds_directly(self, functions: SplitFunctions, state: State) -> bool:
        if not functions.dependence.dense:
            return False
        parameters = [state[name] for name in functions.parameter_names]
        leaves = self._leaves.get(functions)
        if leaves is None or not leaves.are(parameters):
            leaves = self._leaves[functions] = Leaves(parameters)
        return leaves.allows_direct_add(reduced=False) and not leaves.has_hooks()


def _weights(
    functions: SplitFunctions,
    residuals: Sequence[Residuals],
    accumulation: Accumulation,
    sums: Sequence[Tensor] | None,
) -> Sequence[Tensor]:
    return functions.backward_weight_together(residuals, sums, accumulation)


def _read(residuals: Sequence[Residuals]) -> Iterator[Tensor]:
    return (tensor for each in residuals for tensor in each.read)


def _fit(one: DeferredWeights, other: DeferredWeights) -> bool:
    """Whether W of two microbatches can run in one call."""
    mine, theirs = one.flight, other.flight
    if mine.functions is not theirs.functions or one.skipped or other.skipped:
        return False
    names = mine.functions.parameter_names
    same = map(is_, map(mine.state.__getitem__, names), map(theirs.state.__getitem__, names))
    return all(same) and mine.functions.concatenates(mine.residuals, theirs.residuals)
