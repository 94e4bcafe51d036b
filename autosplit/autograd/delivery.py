"""Pending work -> weight gradients in ``.grad``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import Accumulation
from autosplit.runtime.saved_tensors import State
from autosplit.torch_internals.accumulate_grad import Leaves, add_gradients
from autosplit.torch_internals.backward_task import without_autocast

from .deferred_backward import Deferred
from .frozen_parameters import thawed
from .inplace_accumulation import addable


class Delivery:
    """Computes weight gradients and accumulates them as an ordinary ``backward()`` would.

    Where a parameter has hooks, data parallelism looks on, or several calls share one backward,
    autograd's engine hands them over; otherwise they are added to ``.grad`` directly, which is
    the same and spares the engine's time for every parameter.

    Args:
        accumulation: how they are added. In any form but the exact one W adds into ``.grad``
            itself where it may (see ``addable``), one thread at a time. In the concatenated one,
            W of several microbatches runs in one call.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        self._lock = threading.Lock()  # two threads must not both find .grad empty
        self._leaves: weakref.WeakKeyDictionary[SplitFunctions, Leaves]
        self._leaves = weakref.WeakKeyDictionary()

    def __call__(self, works: Sequence[Deferred]) -> None:
        """Compute and deliver what one ``backward()`` left, or several as one sum.

        Raises:
            SplitError: something deferred was written in place since I.
        """
        leaves = self._unnoticed(works)
        if leaves is None:
            _through_autograd(works)
        else:
            self._add(works, leaves)

    def all(self, microbatches: Iterable[Sequence[Deferred]]) -> None:
        """Compute and deliver what several ``backward()`` left, in their order.

        Where factors are to be concatenated, those that follow each other and ran the same graph
        on the same parameters and buffers go through one W, unless anybody would notice that their
        gradients arrive as one.

        Raises:
            SplitError: as for one.
        """
        for together in self._groups(microbatches):
            leaves = self._unnoticed(together[0])
            if leaves is None or len(together) == 1:
                for works in together:
                    self(works)
            else:
                self._add([work for (work,) in together], leaves)

    def _groups(
        self, microbatches: Iterable[Sequence[Deferred]]
    ) -> Iterator[list[Sequence[Deferred]]]:
        group: list[Sequence[Deferred]] = []
        for works in microbatches:
            if group and not (self._accumulation.concatenated and _fit(group[0], works)):
                yield group
                group = []
            group.append(works)
        if group:
            yield group

    def _unnoticed(self, works: Sequence[Deferred]) -> Leaves | None:
        """The parameters, where their gradients may be added to ``.grad`` directly."""
        work = works[0]
        if len(works) > 1 or work.skipped or not work.functions.dependence.dense:
            return None
        leaves = self.leaves(work.functions, work.state)
        return leaves if leaves.unnoticed() else None

    def leaves(self, functions: SplitFunctions, state: State) -> Leaves:
        """The parameters of a graph."""
        parameters = [state[name] for name in functions.parameter_names]
        leaves = self._leaves.get(functions)
        if leaves is None or not leaves.are(parameters):
            leaves = self._leaves[functions] = Leaves(parameters)
        return leaves

    def forget(self) -> None:
        """Hold no parameters and no nodes of theirs any more."""
        self._leaves.clear()

    def _add(self, works: Sequence[Deferred], leaves: Leaves) -> None:
        """One microbatch, or several in one W."""
        with torch.set_grad_enabled(False), without_autocast():
            if not self._accumulation.exact and self._add_inside(works):
                return
            grads = _gradients(works)
            with self._lock:
                add_gradients(leaves.parameters, grads, works[0].functions.borrowed)

    def _add_inside(self, works: Sequence[Deferred]) -> bool:
        """Let W add into ``.grad``, and add what I made already; False where W must not."""
        functions, state = works[0].functions, works[0].state
        late, early = functions.late_parameters, functions.early_parameters
        specs, borrowed = functions.dependence.gradient_specs, functions.dependence.borrowed
        with self._lock:
            sums = addable(
                [state[name] for name in late],
                [specs[name] for name in late],
                # Not held while W lets go of it.
                (tensor for work in works for tensor in (*work.handover.read, *work.early)),
            )
            if sums is None:
                return False
            handed = [work.handover for work in works]
            functions.backward_weight_together(handed, sums, self._accumulation)
            increment_version(sums)  # compiled graphs do not
            for work in works if early else ():
                parameters = [state[name] for name in early]
                add_gradients(parameters, work.early, [name in borrowed for name in early])
        return True


def weight_gradients(work: Deferred) -> list[Tensor | None]:
    """A gradient for each of ``parameter_names``, to be handed to autograd: None where there is
    none, and each a tensor of its own.
    """
    with without_autocast():
        grads = _gradients([work])
    functions = work.functions
    found = zip(functions.parameter_names, grads, functions.borrowed, strict=True)
    return [
        None if name in work.skipped else grad.clone() if borrowed else grad
        for name, grad, borrowed in found
    ]


def _fit(one: Sequence[Deferred], other: Sequence[Deferred]) -> bool:
    """Whether W of two microbatches can run in one call."""
    if len(one) > 1 or len(other) > 1 or one[0].skipped or other[0].skipped:
        return False
    (first,), (second,) = one, other
    if first.functions is not second.functions:
        return False
    names = first.functions.parameter_names
    pairs = ((first.state[name], second.state[name]) for name in names)
    return all(mine is theirs for mine, theirs in pairs) and first.functions.concatenates(
        first.handover, second.handover
    )


def _gradients(works: Sequence[Deferred]) -> Sequence[Tensor]:
    """W of one microbatch, or of several in one call, and what I made already, in the order of
    ``parameter_names``.
    """
    functions = works[0].functions
    late = functions.backward_weight_together([work.handover for work in works])
    if not functions.early_parameters:
        return late
    early = [reduce(torch.add, each) for each in zip(*(w.early for w in works), strict=True)]
    found = dict(zip(functions.early_parameters, early, strict=True))
    found |= zip(functions.late_parameters, late, strict=True)
    return [found[name] for name in functions.parameter_names]


def _through_autograd(works: Sequence[Deferred]) -> None:
    """In one pass of the engine: a parameter that several of the works have a gradient for gets
    one sum, and its hooks fire once.
    """
    roots = []
    with torch.enable_grad(), thawed(each for work in works for each in work.parameters):
        # The engine runs the newest node first: gradients add up in the order of the works.
        for work in reversed(works):
            if work.parameters:
                roots.append(_Deliver.apply(work, *work.parameters))  # type: ignore[no-untyped-call]
        if roots:
            torch.autograd.backward(roots)


class _Deliver(torch.autograd.Function):
    """A root whose backward is W: the engine hands the gradients straight to the parameters."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, work: Deferred, *_: Tensor) -> Tensor:
        ctx.work = work  # type: ignore[attr-defined]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, _: Tensor) -> tuple[Tensor | None, ...]:
        work: Deferred = ctx.work  # type: ignore[attr-defined]
        with without_autocast():
            grads = _gradients([work])
        pairs = zip(work.functions.parameter_names, grads, strict=True)
        return (None, *(grad for name, grad in pairs if name not in work.skipped))
