"""``LazyGradients``: installs, computes and hands over the lazy gradients of one pending queue.

Ownership of pending work by parameters, which may outlive their split module.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autosplit.torch_internals.autograd import UNHELD, is_held, tensor_users

from .lazy_gradient import ARMED, COMPUTING, IDLE, OURS, GradientSlot, LazyGradient

if TYPE_CHECKING:
    from .pending import PendingQueue

_FEW = 64


class LazyGradients:
    """Installs lazy gradients in ``.grad``, replaces them by real ones, and drops what is pending
    for those that are neither there nor anywhere else any more, as ``.grad`` was cleared.

    The caller guards every call by one lock, which the owner's ``sweep`` and
    ``drop`` take too.

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
        self._hidden: list[tuple[GradientSlot, Tensor, Tensor | None]] = []
        self._hiding = 0

    def hide(self) -> None:
        """Have lazy gradients stay out of ``.grad`` while parameters are traced, which would use
        them; those that other threads install meanwhile, too.
        """
        self._hiding += 1

    def conceal(self, parameters: Iterable[Tensor]) -> None:
        """Take the lazy gradients of these parameters out of ``.grad``."""
        for parameter in parameters:
            slot = GradientSlot.of(parameter)
            if slot is not None:
                self._hidden.append((slot, parameter, parameter.grad))
                slot.hidden, parameter.grad = True, None

    def show(self) -> None:
        """Restore hidden lazy gradients once no thread traces."""
        self._hiding -= 1
        while self._hidden and not self._hiding:
            slot, parameter, lazy = self._hidden.pop()
            slot.hidden = False
            # Another thread may have computed it.
            if slot.state is ARMED and slot.lazy is lazy and parameter.grad is None:
                parameter.grad = lazy

    def promise(self, parameters: Sequence[Tensor]) -> GradientSlot | None:
        """Put lazy gradients into ``.grad`` of parameters whose gradients are pending from now on.

        Args:
            parameters: leaves.

        Returns:
            None; or a slot to be computed first, and then promise again: the gradient that was
            pending before is referenced elsewhere, and not in ``.grad``.
        """
        owner = self._owner()
        if owner is None:
            return None
        known, sources = self._slots.get, (owner,)
        slot: GradientSlot | None = None
        for parameter in parameters:
            slot = known(id(parameter))
            if slot is None or slot.parameter() is not parameter:
                slot = self._slot(parameter)
            lazy = slot.lazy
            if lazy is not None:  # as a rule: no calls
                state, grad = slot.state, parameter.grad
                if state is IDLE and type(grad) is not LazyGradient:
                    if grad is not None and not self.held:
                        self.held = getrefcount(grad) > UNHELD or is_held(grad)
                    slot.sources, slot.base, slot.state = sources, grad, ARMED
                    try:
                        parameter.grad = lazy
                    except RuntimeError:
                        slot.arm(parameter, grad)
                    continue
                if state is ARMED and grad is lazy and slot.sources == sources:
                    continue
            slot, blocked = self._promised(slot, parameter, owner)
            if blocked:
                return slot
        if parameters:
            self._keep(parameters[-1], owner)
        if self._hiding:
            self.conceal(parameters)
        return None

    def _promised(
        self, slot: GradientSlot, parameter: Tensor, owner: PendingQueue
    ) -> tuple[GradientSlot, bool]:
        """Promise one gradient, whatever is in ``.grad``: the slot used, and whether it has to be
        computed first.
        """
        sources = (owner,)
        if slot.state is ARMED and not slot.installed(parameter):
            self.sweep()
            if slot.state is ARMED:
                return slot, True
        if slot.state is IDLE:
            grad = parameter.grad
            if type(grad) is not LazyGradient:
                if grad is not None and not self.held:
                    self.held = getrefcount(grad) > UNHELD or is_held(grad)
                slot.sources = sources
                slot.arm(parameter, grad)
                return slot, False
            slot = self._joined(slot, parameter, grad)
        if owner not in slot.sources:
            slot.sources = (*slot.sources, owner)
        return slot, False

    def lift(self) -> list[GradientSlot]:
        """Begin a computation: put the sums so far in the place of lazy gradients, and drop what is
        pending for those that were freed.
        """
        lifted, held = self._present()
        for slot, parameter in held:
            slot.aside = [parameter.grad]
        lifted += held
        for slot, parameter in lifted:
            slot.state = COMPUTING
            parameter.grad = slot.base
            slot.base = None
        return [slot for slot, _ in lifted]

    def discard(self) -> None:
        """Restore every ``.grad`` as it was; the owner has forgotten all works."""
        lifted = self.lift()
        for slot in lifted:
            slot.lazy = None
        self.settle(lifted)

    def settle(self, lifted: Iterable[GradientSlot], failure: BaseException | None = None) -> None:
        """End a computation: what was lifted has been computed.

        Args:
            lifted: the slots.
            failure: why it could not be computed.
        """
        owner = self._owner()
        works = () if owner is None else owner.works()
        simply = not works and failure is None
        waiting: dict[PendingQueue, Collection[int]] = {}
        for slot in lifted:
            if simply and len(slot.sources) == 1 and slot.aside is None and slot.failure is None:
                slot.sources, slot.state = (), IDLE
                # As ``GradientSlot.held``, without a call for each.
                if getrefcount(slot.lazy) > OURS or tensor_users(slot.lazy) > 1:
                    self._hand_over(slot)
                continue
            if failure is not None:
                slot.failure = failure
            for source in slot.sources:
                if source not in waiting:
                    waiting[source] = source.waiting()
            slot.sources = tuple([each for each in slot.sources if slot.key in waiting[each]])
            self._settle_kept(slot)
        if not works:
            self._release()

    def sweep(self) -> None:
        """Drop what is pending for every lazy gradient that was freed."""
        self._present()

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

    def _present(
        self,
    ) -> tuple[list[tuple[GradientSlot, Tensor]], list[tuple[GradientSlot, Tensor]]]:
        """Drop what is pending for every lazy gradient that was freed.

        Returns:
            The slots of the others with their parameters: those in ``.grad``, and those that are
            not but that are referenced elsewhere.
        """
        there: list[tuple[GradientSlot, Tensor]] = []
        held: list[tuple[GradientSlot, Tensor]] = []
        gone: list[GradientSlot] = []
        for slot in self._slots.values():
            if slot.state is not ARMED:
                continue
            parameter = slot.parameter()
            if parameter is None:
                gone.append(slot)
                continue
            if parameter.grad is slot.lazy or slot.hidden:
                there.append((slot, parameter))
            elif slot.failure is None and slot.held():
                held.append((slot, parameter))
            else:
                gone.append(slot)
        _drop(gone)
        return there, held

    def _slot(self, parameter: Tensor) -> GradientSlot:
        """The slot that another owner has made, or a new one."""
        if len(self._slots) >= self._limit:
            live = {key: each for key, each in self._slots.items() if each.parameter() is not None}
            self._slots, self._limit = live, 2 * len(live) + _FEW
        slot = self._slots[id(parameter)] = GradientSlot.of(parameter) or GradientSlot(parameter)
        return slot

    def _joined(self, slot: GradientSlot, parameter: Tensor, grad: LazyGradient) -> GradientSlot:
        """The slot to use where ``.grad`` holds the lazy gradient of another slot."""
        found = GradientSlot.of(parameter)
        if found is not None:  # another owner's
            self._slots[id(parameter)] = found
            return found
        slot.sources = ()
        slot.arm(parameter, grad.value())  # another parameter's, or one that was put back
        self.held = True
        return slot

    def _settle_kept(self, slot: GradientSlot) -> None:
        """Settle a slot that is pending still, or whose gradient is not in ``.grad``."""
        parameter = slot.parameter()
        if parameter is None:
            return
        aside, slot.aside = slot.aside, None
        if slot.sources or slot.failure:
            slot.arm(parameter, parameter.grad)
        else:
            slot.disarm()
            if slot.held():
                self._hand_over(slot)
        if aside is not None:
            (parameter.grad,) = aside

    def _hand_over(self, slot: GradientSlot) -> None:
        """Let the lazy gradient, which is referenced elsewhere, stand for the real one."""
        parameter = slot.parameter()
        real = None if parameter is None else parameter.grad
        if real is None:
            slot.lazy = None
        else:
            slot.hand_over(real)

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
        slot.sources = ()
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
