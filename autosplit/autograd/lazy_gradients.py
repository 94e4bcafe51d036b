"""``LazyGradients``: installs, computes and hands over the lazy gradients of one pending queue.

Ownership of pending work by parameters, which may outlive their split module.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autosplit.torch_internals.autograd import any_held

from .lazy_gradient import ADDING, GradientSlot, LazyGradient, pending

if TYPE_CHECKING:
    from .pending import PendingQueue

_FEW = 64
_GRAD = attrgetter("grad")


class LazyGradients:
    """Installs lazy gradients in ``.grad``, replaces them by real ones, and drops what is pending
    for those that are neither there nor anywhere else any more, as ``.grad`` was cleared.

    The caller holds ``NOTING`` around every call.

    Args:
        owner: whose work waits.

    Attributes:
        held: whether somebody refers to a sum whose place a lazy gradient has taken since this was
            last reset: it is to be right when the backward is over.
    """

    def __init__(self, owner: PendingQueue) -> None:
        self._owner = weakref.ref(owner)
        self._slots: dict[int, GradientSlot] = {}
        self._limit = _FEW
        self.held = False
        self._keeping: list[weakref.ref[Tensor]] = []

    def promise(self, parameters: Sequence[Tensor]) -> GradientSlot | None:
        """Put lazy gradients into ``.grad`` of parameters whose gradients are pending from now on.

        Args:
            parameters: leaves.

        Returns:
            None; or a slot to be computed first, and then promise again: a gradient that was
            pending before is referenced elsewhere, and not in its ``.grad``, or another thread
            computes it.
        """
        owner = self._owner()
        if owner is None:
            return None
        if not self.held:
            sums = [
                g for g in map(_GRAD, parameters) if g is not None and type(g) is not LazyGradient
            ]
            self.held = any_held(sums)
            del sums
        known, sources = self._slots.get, (owner,)
        slot: GradientSlot | None = None
        for parameter in parameters:
            slot = known(id(parameter))
            if slot is None or slot.parameter() is not parameter:
                slot = self._slot(parameter)
            lazy = slot.lazy
            if lazy is not None:  # as a rule: no calls
                grad = parameter.grad
                if slot.armed:
                    if grad is lazy and slot.sources == sources:
                        continue
                elif type(grad) is not LazyGradient:
                    slot.sources, slot.grad, slot.armed = sources, grad, True
                    try:
                        parameter.grad = lazy
                    except RuntimeError:
                        slot.arm(parameter, grad)
                    continue
            slot, blocked = self._promised(slot, parameter, owner)
            if blocked:
                return slot
        if parameters:
            self._keep(parameters[-1], owner)
        return None

    def _promised(
        self, slot: GradientSlot, parameter: Tensor, owner: PendingQueue
    ) -> tuple[GradientSlot, bool]:
        """Promise one gradient, whatever is in ``.grad``: the slot used, and whether it has to be
        computed first.
        """
        sources = (owner,)
        if slot.armed and not slot.installed(parameter):
            self.sweep()
            if slot.armed:
                return slot, True
        if not slot.armed:
            grad = parameter.grad
            if type(grad) is not LazyGradient:
                slot.sources = sources
                slot.arm(parameter, grad)
                return slot, False
            found = pending(grad)
            if found is None:  # that stands for a real one: of another parameter, or put back
                slot.arm(parameter, grad.value())
                self.held = True
            elif found[1] is parameter:  # another owner's
                slot = self._slots[slot.key] = found[0]
            else:
                return found[0], True
        if owner not in slot.sources:
            slot.sources = (*slot.sources, owner)
        return slot, False

    def begin(self) -> list[GradientSlot]:
        """Begin a computation, and drop what is pending for lazy gradients that were freed.

        Returns:
            The slots of the others.
        """
        begun = self._present()
        for slot in begun:
            slot.computing += 1
        return begun

    def discard(self) -> None:
        """Restore every ``.grad`` as it was; the owner has forgotten all works."""
        begun = self.begin()
        for slot in begun:
            parameter = slot.parameter()
            there = parameter is not None and parameter.grad is slot.lazy
            slot.lazy = None
            if there:  # what others hold is not to become the real one
                slot.arm(parameter, slot.grad)  # type: ignore[arg-type]
        self.settle(begun)

    def settle(self, begun: Iterable[GradientSlot], failure: BaseException | None = None) -> None:
        """End a computation: what was pending when it began has been computed.

        Args:
            begun: the slots.
            failure: why it could not be computed.
        """
        owner = self._owner()
        works = () if owner is None else owner.works()
        simply = not works and failure is None
        waiting: dict[PendingQueue, Collection[int]] = {}
        with ADDING:
            for slot in begun:
                slot.computing -= 1
                if failure is not None:
                    slot.failure = failure
                if slot.computing:  # by another thread, for another queue
                    continue
                if not simply or len(slot.sources) > 1 or slot.failure is not None:
                    for source in slot.sources:
                        if source not in waiting:
                            waiting[source] = source.waiting()
                    left = tuple([each for each in slot.sources if slot.key in waiting[each]])
                    if left or slot.failure is not None:
                        slot.sources = left
                        continue
                slot.hand_over()
        if not works:
            self._release()

    def sweep(self) -> None:
        """Drop what is pending for every lazy gradient that was freed."""
        self._present()

    def parameters(self) -> list[Tensor]:
        """The parameters of which a gradient is pending, or being computed."""
        found = [slot.parameter() for slot in self._slots.values() if slot.armed]
        return [parameter for parameter in found if parameter is not None]

    def drop(self, parameters: Collection[int]) -> None:
        """Drop the pending gradients of these parameters (their ``id``)."""
        owner = self._owner()
        if owner is None:
            return
        empty = []
        for work in owner.works():
            work.drop(parameters)
            if not work.parameters:
                empty.append(work)
        owner.forget(empty)
        if not owner.works():
            self._release()

    def _present(self) -> list[GradientSlot]:
        """Drop what is pending for every lazy gradient that was freed.

        Returns:
            The slots of the others: in ``.grad``, being computed, or referenced elsewhere.
        """
        present: list[GradientSlot] = []
        gone: list[GradientSlot] = []
        for slot in self._slots.values():
            if not slot.armed:
                continue
            parameter = slot.parameter()
            if parameter is not None and (
                parameter.grad is slot.lazy
                or slot.hidden
                or slot.computing
                or (slot.failure is None and slot.held())
            ):
                present.append(slot)
            else:
                gone.append(slot)
        _drop(gone)
        return present

    def _slot(self, parameter: Tensor) -> GradientSlot:
        """The slot that another owner has made, or a new one."""
        if len(self._slots) >= self._limit:
            live = {key: each for key, each in self._slots.items() if each.parameter() is not None}
            self._slots, self._limit = live, 2 * len(live) + _FEW
        slot = self._slots[id(parameter)] = GradientSlot.of(parameter) or GradientSlot(parameter)
        return slot

    def _keep(self, parameter: Tensor, owner: PendingQueue) -> None:
        """Let the owner live at least as long as the parameter."""
        kept = parameter.__dict__.get(_OWNERS)
        if not isinstance(kept, _Owners):
            kept = parameter.__dict__[_OWNERS] = _Owners()
        if owner not in kept.queues:
            kept.queues.add(owner)
            self._keeping.append(weakref.ref(parameter))

    def _release(self) -> None:
        """Have no parameter keep the owner any more."""
        owner = self._owner()
        for reference in self._keeping:
            parameter = reference()
            kept = None if parameter is None else parameter.__dict__.get(_OWNERS)
            if parameter is not None and isinstance(kept, _Owners):
                kept.queues -= {owner}
                if not kept.queues:
                    del parameter.__dict__[_OWNERS]
        self._keeping.clear()


def _drop(gone: Iterable[GradientSlot]) -> None:
    """Drop what is pending for these slots."""
    dropped: dict[PendingQueue, set[int]] = {}
    for slot in gone:
        for source in slot.sources:
            dropped.setdefault(source, set()).add(slot.key)
        slot.disarm()
        if slot.held():
            slot.lazy = None
    for source, keys in dropped.items():
        source.drop(keys)


_OWNERS = "_autosplit_pending"


class _Owners:
    """Attribute of a parameter: the queues that it keeps alive, which may outlive their module."""

    def __init__(self) -> None:
        self.queues: set[PendingQueue] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a parameter has no gradient; this is what any unpickler may load."""
        return OrderedDict, ()
