"""Accumulation of a stage's weight gradients into ``.grad``, as a backward of autograd would."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from autosplit.autograd.pending import PendingWork
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.in_flight import InFlightMicrobatch
from autosplit.runtime.residuals import State
from autosplit.torch_internals.autograd import KnownLeaves, add_gradients
from autosplit.torch_internals.dtensor import is_dtensor, local_tensor

_SMALL = 2**20  # bytes of all weight gradients of a microbatch


class WeightGradients:
    """Runs I, W and B of a stage and adds the weight gradients to ``.grad``.

    Hooks fire once for each microbatch, as in a loop that calls ``backward()`` for each; where a
    parameter has one, autograd's engine hands the gradients over. Elsewhere the graph adds them
    itself, so that one gradient at a time is held, or, where they are small, they are added behind
    it all at once. A graph may write one sum before it has read what the others are made from, so
    it adds only into sums that it made itself: these lie apart from everything else.
    """

    def __init__(self) -> None:
        self._leaves = KnownLeaves()
        self._made: weakref.WeakKeyDictionary[SplitFunctions, _Sums] = weakref.WeakKeyDictionary()
        self._large: weakref.WeakKeyDictionary[SplitFunctions, bool] = weakref.WeakKeyDictionary()

    def input(
        self, flight: InFlightMicrobatch, grads: list[Tensor | None], skipped: frozenset[str]
    ) -> tuple[list[Tensor | None], PendingWork]:
        """I: gradients of the inputs, and what is left for W. Empties ``grads``."""
        functions, saved, state = flight.functions, flight.residuals, flight.state
        target = self._target(functions, functions.early_parameters, state, skipped)
        found, deferred, early = functions.backward_input(saved, grads, target.sums)
        target.add(early)
        return found, PendingWork(functions, deferred, state, skipped)

    def deferred(self, work: PendingWork) -> None:
        """W."""
        functions, deferred = work.graph, work.deferred
        names = functions.late_parameters
        target = self._target(functions, names, work.state, work.skipped)
        target.add(functions.backward_weight(deferred, target.sums))

    def whole(
        self, flight: InFlightMicrobatch, grads: list[Tensor | None], skipped: frozenset[str]
    ) -> list[Tensor | None]:
        """B: gradients of the inputs. Empties ``grads``."""
        functions, saved, state = flight.functions, flight.residuals, flight.state
        target = self._target(functions, functions.parameter_names, state, skipped)
        found, weights = functions.backward(saved, grads, target.sums)
        target.add(weights)
        return found

    def _target(
        self,
        functions: SplitFunctions,
        names: Sequence[str],
        state: State,
        skipped: Collection[str],
    ) -> _Target:
        """Where the gradients of a graph go.

        Args:
            functions: the graph's.
            names: whose gradients it makes, in its order.
            state: has the parameters.
            skipped: those that get none.
        """
        direct = not skipped and self._adds_directly(functions, state)
        target = _Target(functions, names, state, skipped, direct)
        if direct and names and self._adds_inside(functions):
            target.made = self._made.setdefault(functions.base, {})
            target.find_sums()
        return target

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


_Sums = dict[str, "weakref.ref[Tensor]"]
"""Sums in ``.grad``, by their parameters' names."""


@dataclasses.dataclass(eq=False)
class _Target:
    """Where the gradients of one call of a graph go.

    Attributes:
        functions: the graph's.
        names: of the parameters, in the graph's order.
        state: has them.
        skipped: those that get none.
        direct: whether adding is all that there is to do.
        made: sums that these graphs made; None where they do not add into any.
        sums: what the graph adds them into itself; None where it makes new ones.
    """

    functions: SplitFunctions
    names: Sequence[str]
    state: State
    skipped: Collection[str]
    direct: bool
    made: _Sums | None = None
    sums: list[Tensor] | None = None

    def find_sums(self) -> None:
        """Take the parameters' ``.grad`` as accumulators, where the graphs made all of them."""
        made = self.made or {}
        grads = [(made.get(name), self.state[name].grad) for name in self.names]
        mine = [grad for known, grad in grads if grad is not None and known and known() is grad]
        self.sums = mine if len(mine) == len(grads) else None

    def add(self, found: Sequence[Tensor]) -> None:
        """Add what the graph has made."""
        names, state, own = self.names, self.state, self.functions.dependence.borrowed
        if self.sums is not None:
            # What added to them may be compiled, which counts no writes.
            increment_version([*self.sums, *(local_tensor(s) for s in self.sums if is_dtensor(s))])
        elif self.direct:
            new = [name for name in names if state[name].grad is None]
            add_gradients([state[n] for n in names], found, [n in own for n in names])
            if self.made is not None:
                self._note(self.made, new)
        else:
            pairs = [(n, g) for n, g in zip(names, found, strict=True) if n not in self.skipped]
            pairs = [(n, g.clone() if n in own else g) for n, g in pairs if state[n].requires_grad]
            if pairs:
                torch.autograd.backward([state[n] for n, _ in pairs], [g for _, g in pairs])

    def _note(self, made: _Sums, new: Sequence[str]) -> None:
        """Note sums that are there now; a graph is compiled for those of its gradients' dtype."""
        specs = self.functions.dependence.gradient_specs
        for name in new:
            total = self.state[name].grad
            if total is not None and total.dtype is specs[name].dtype:
                made[name] = weakref.ref(total)
