"""Pending work -> weight gradients in ``.grad``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .accumulation import Accumulation
from .addable import addable
from .compat import without_autocast
from .compat_leaves import Leaves, add_gradients
from .functions import SplitFunctions
from .guard import refuse_frozen
from .pending import Deferred


class Delivery:
    """Computes weight gradients and accumulates them as an ordinary ``backward()`` would.

    Where a parameter has hooks, data parallelism looks on, or several calls share one backward,
    autograd's engine hands them over; otherwise they are added to ``.grad`` directly, which is
    the same and spares the engine's time for every parameter.

    Args:
        accumulation: how they are added. In any form but the exact one W adds into ``.grad``
            itself where it may (see ``addable``), one thread at a time.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        self._lock = threading.Lock()  # two threads must not both find .grad empty
        self._leaves: weakref.WeakKeyDictionary[SplitFunctions, Leaves]
        self._leaves = weakref.WeakKeyDictionary()

    def __call__(self, works: Sequence[Deferred]) -> None:
        """Compute and deliver what one ``backward()`` left, or several as one sum.

        Raises:
            SplitError: something deferred was written in place since I, or a parameter was frozen.
        """
        work = works[0]
        if len(works) == 1 and not work.skipped and work.functions.dependence.dense:
            leaves = self._leaves_of(work)
            if leaves.unnoticed():
                self._add(work, leaves)
                return
        _through_autograd(works)

    def forget(self) -> None:
        """Hold no parameters and no nodes of theirs any more."""
        self._leaves.clear()

    def _leaves_of(self, work: Deferred) -> Leaves:
        parameters = [work.state[name] for name in work.functions.parameter_names]
        leaves = self._leaves.get(work.functions)
        if leaves is None or not leaves.are(parameters):
            leaves = self._leaves[work.functions] = Leaves(parameters)
        return leaves

    def _add(self, work: Deferred, leaves: Leaves) -> None:
        with torch.set_grad_enabled(False), without_autocast():
            if not self._accumulation.exact and self._add_inside(work):
                return
            grads = _gradients(work)
            with self._lock:
                add_gradients(leaves.parameters, grads, work.functions.borrowed)

    def _add_inside(self, work: Deferred) -> bool:
        """Let W add into ``.grad``, and add what I made already; False where W must not."""
        functions, state = work.functions, work.state
        late, early = functions.late_parameters, functions.early_parameters
        specs, borrowed = functions.dependence.gradient_specs, functions.dependence.borrowed
        with self._lock:
            sums = addable(
                [state[name] for name in late],
                [specs[name] for name in late],
                (*work.handover.read, *work.early),  # not held while W lets go of it
            )
            if sums is None:
                return False
            functions.backward_weight(work.handover, sums, self._accumulation)
            increment_version(sums)  # compiled graphs do not
            if early:
                parameters = [state[name] for name in early]
                add_gradients(parameters, work.early, [name in borrowed for name in early])
        return True


def weight_gradients(work: Deferred) -> list[Tensor | None]:
    """A gradient for each of ``parameter_names``, to be handed to autograd: None where there is
    none, and each a tensor of its own.
    """
    with without_autocast():
        grads = _gradients(work)
    functions = work.functions
    found = zip(functions.parameter_names, grads, functions.borrowed, strict=True)
    return [
        None if name in work.skipped else grad.clone() if borrowed else grad
        for name, grad, borrowed in found
    ]


def _gradients(work: Deferred) -> Sequence[Tensor]:
    """W, and what I made already, in the order of ``parameter_names``."""
    functions = work.functions
    late = functions.backward_weight(work.handover)
    if not work.early:
        return late
    found = dict(zip(functions.early_parameters, work.early, strict=True))
    found |= zip(functions.late_parameters, late, strict=True)
    return [found[name] for name in functions.parameter_names]


def _through_autograd(works: Sequence[Deferred]) -> None:
    """In one pass of the engine: a parameter that several of the works have a gradient for gets
    one sum, and its hooks fire once.
    """
    refuse_frozen(pair for work in works for pair in work.named_parameters())
    roots = []
    with torch.enable_grad():
        # The engine runs the newest node first: gradients add up in the order of the works.
        for work in reversed(works):
            parameters = [parameter for _, parameter in work.named_parameters()]
            if parameters:
                roots.append(_Deliver.apply(work, *parameters))  # type: ignore[no-untyped-call]
    if roots:
        torch.autograd.backward(roots, retain_graph=any(work.retained for work in works))


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
            grads = _gradients(work)
        pairs = zip(work.functions.parameter_names, grads, strict=True)
        return (None, *(grad for name, grad in pairs if name not in work.skipped))
