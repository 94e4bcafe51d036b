"""``Delivery``: runs W of pending microbatches and accumulates into ``.grad``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import Accumulation
from autosplit.runtime.residuals import State
from autosplit.torch_internals.autograd import Leaves, add_gradients, without_autocast

from .deferred_backward import DeferredBackward, summed_gradients
from .engine_delivery import deliver_through_engine
from .inplace_accumulation import inplace_sums, note_written


class Delivery:
    """Computes weight gradients and accumulates them as an ordinary ``backward()`` would.

    Hooks do not fire: a parameter had none when the backward ran, which would have computed its
    gradient itself. Where data parallelism looks on, or several calls share one backward,
    autograd's engine hands them over; otherwise they are added to ``.grad`` directly, which is
    the same and spares the engine's time for every parameter.

    Args:
        accumulation: how they are added. In any form but the exact one W adds into ``.grad``
            itself where it may (see ``inplace_sums``), one thread at a time. In the concatenated
            one, W of several microbatches runs in one call.
    """

    _reduced: bool | None = None  # whether data parallelism looks on, where that is known

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        self._lock = threading.Lock()  # two threads must not both find .grad empty
        self._leaves: weakref.WeakKeyDictionary[SplitFunctions, Leaves]
        self._leaves = weakref.WeakKeyDictionary()

    def __call__(self, works: Sequence[DeferredBackward]) -> None:
        """Compute and deliver what one ``backward()`` left, or several as one sum.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        leaves = self._added_directly(works)
        if leaves is None:
            self._deliver_through_engine(works)
        else:
            self._add(works, leaves)

    def all(self, microbatches: Iterable[Sequence[DeferredBackward]]) -> None:
        """Compute and deliver what several ``backward()`` left, in their order.

        With concatenated accumulation, those that follow each other and ran the same graph on the
        same parameters and buffers go through one W.

        Raises:
            SplitError: as for one.
        """
        for together in self._groups(microbatches):
            leaves = self._added_directly(together[0])
            if leaves is None or len(together) == 1:
                for works in together:
                    self(works)
            else:
                self._add([work for (work,) in together], leaves)

    def _groups(
        self, microbatches: Iterable[Sequence[DeferredBackward]]
    ) -> Iterator[list[Sequence[DeferredBackward]]]:
        group: list[Sequence[DeferredBackward]] = []
        for works in microbatches:
            if group and not (self._accumulation.concatenated and _fit(group[0], works)):
                yield group
                group = []
            group.append(works)
        if group:
            yield group

    def _added_directly(self, works: Sequence[DeferredBackward]) -> Leaves | None:
        """The parameters, where their gradients may be added to ``.grad`` directly."""
        work = works[0]
        if len(works) > 1 or work.skipped or not work.functions.dependence.dense:
            return None
        leaves = self.leaves(work.functions, work.state)
        return leaves if leaves.allows_direct_add(reduced=self._reduced) else None

    def leaves(self, functions: SplitFunctions, state: State) -> Leaves:
        """The parameters of a graph."""
        parameters = [state[name] for name in functions.parameter_names]
        leaves = self._leaves.get(functions)
        if leaves is None or not leaves.are(parameters):
            leaves = self._leaves[functions] = Leaves(parameters)
        return leaves

    def forget(self) -> None:
        """Drop references to parameters and their autograd nodes."""
        self._leaves.clear()

    def _deliver_through_engine(self, works: Sequence[DeferredBackward]) -> None:
        hooked = any(self.leaves(work.functions, work.state).has_hooks() for work in works)
        deliver_through_engine(works, hooked=hooked)

    def _add(self, works: Sequence[DeferredBackward], leaves: Leaves) -> None:
        """One microbatch, or several in one W."""
        with torch.set_grad_enabled(False), without_autocast():
            if not self._accumulation.exact and self._add_inside(works):
                return
            grads = summed_gradients(works)
            with self._lock:
                add_gradients(leaves.parameters, grads, works[0].functions.borrowed)

    def _add_inside(self, works: Sequence[DeferredBackward]) -> bool:
        """Have W add into ``.grad``, and add the gradients that I made; False where W must not."""
        functions, state = works[0].functions, works[0].state
        late, early = functions.late_parameters, functions.early_parameters
        specs, borrowed = functions.dependence.gradient_specs, functions.dependence.borrowed
        with self._lock:
            sums = inplace_sums(
                [state[name] for name in late],
                [specs[name] for name in late],
                [functions.gradient_shardings.get(name) for name in late],
                # Not held while W lets go of it.
                (tensor for work in works for tensor in (*work.deferred.read, *work.early)),
            )
            if sums is None:
                return False
            handed = [work.deferred for work in works]
            functions.backward_weight_together(handed, sums, self._accumulation)
            note_written(sums)
            for work in works if early else ():
                parameters = [state[name] for name in early]
                add_gradients(parameters, work.early, [name in borrowed for name in early])
        return True


def weight_gradients(work: DeferredBackward) -> list[Tensor | None]:
    """A gradient for each of ``parameter_names``, to be handed to autograd: None where there is
    none, and each a tensor of its own.
    """
    gradients, borrowed = work.named_gradients(), work.functions.dependence.borrowed
    return [
        None if name in work.skipped else grad.clone() if name in borrowed else grad
        for name, grad in gradients.items()
    ]


def _fit(one: Sequence[DeferredBackward], other: Sequence[DeferredBackward]) -> bool:
    """Whether W of two microbatches can run in one call."""
    if len(one) > 1 or len(other) > 1 or one[0].skipped or other[0].skipped:
        return False
    (first,), (second,) = one, other
    if first.functions is not second.functions:
        return False
    names = first.functions.parameter_names
    pairs = ((first.state[name], second.state[name]) for name in names)
    return all(mine is theirs for mine, theirs in pairs) and first.functions.concatenates(
        first.deferred, second.deferred
    )
