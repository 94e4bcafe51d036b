"""The lazy gradients behind which one owner's pending work waits."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from sys import getrefcount
from typing import Any, Protocol

from torch import Tensor

from autosplit.torch_internals.accumulate_grad import tensor_users

from .lazy_gradient import ARMED, COMPUTING, IDLE, OURS, USED, LazyGradient, Slot, Source

_ATTRIBUTE = "_autosplit_pending"
_FEW = 64


class Work(Protocol):
    """What one backward through one graph left for W."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """The parameters that get a gradient."""

    def drop(self, parameters: Collection[int]) -> None:
        """These (their ``id``) get none any more."""


class Owner(Source, Protocol):
    """Whoever has work pending."""

    def works(self) -> Sequence[Work]:
        """What is pending, oldest first."""

    def forget(self, works: Collection[Work]) -> None:
        """These are not pending any more: nobody wants any of their gradients."""


class LazyGradients:
    """Puts lazy gradients into ``.grad``, takes them out again, and finds out which are gone.

    One lazy gradient a parameter is kept from step to step, because making one takes longer than
    everything else here together. So its end would go unnoticed; but for each work one is not
    kept, and where that one ends, all are looked at.

    The caller guards every call but ``reclaim`` by one lock, which the owner's ``sweep`` and
    ``drop`` take too.

    Args:
        owner: whose work waits.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self._slots: dict[int, Slot] = {}
        self._limit = _FEW
        self._used: list[Slot] = []
        self._keepers: list[weakref.ref[Tensor]] = []
        self._hidden: list[Slot] = []
        self._hiding = 0

    def hide(self, parameters: Iterable[Tensor]) -> None:
        """Take lazy gradients out of ``.grad`` while parameters are traced, which would use them;
        those that other threads' backwards promise meanwhile stay out as well.
        """
        self._hiding += 1
        for parameter in parameters:
            slot = Slot.of(parameter)
            if slot is not None and slot.state is ARMED:
                self._hide(slot)
                slot.conceal(parameter)

    def show(self) -> None:
        """Put them back, when nobody traces any more."""
        self._hiding -= 1
        if not self._hiding:
            hidden, self._hidden = self._hidden, []
            for slot in hidden:
                slot.reveal()

    def _hide(self, slot: Slot) -> None:
        if not slot.hidden:
            slot.hidden = True
            self._hidden.append(slot)

    def promise(self, parameters: Sequence[Tensor], *, dense: bool) -> Slot | None:
        """Gradients of these are pending from now on.

        Args:
            parameters: leaves.
            dense: whether their gradients are known to be strided.

        Returns:
            None; or a slot to be computed first, and then promise again: somebody holds the
            gradient that was pending before, and ``.grad`` does not.
        """
        owner = self._owner()
        if owner is None:
            return None
        self.reclaim()
        known, sources, hiding = self._slots.get, (owner,), self._hiding
        slot: Slot | None = None
        for parameter in parameters:
            slot = known(id(parameter))
            if slot is None or slot.parameter() is not parameter:
                slot = self._slot(parameter)
            if slot.state is IDLE and slot.lazy is not None and not hiding:  # as a rule: no calls
                grad = parameter.grad
                if type(grad) is not LazyGradient:
                    slot.sources, slot.dense, slot.base, slot.state = sources, dense, grad, ARMED
                    try:
                        parameter.grad = slot.lazy
                    except RuntimeError:
                        slot.arm(parameter, grad)
                    continue
            if slot.state is USED:  # by another owner
                slot.reuse()
            if slot.state is ARMED and not slot.installed(parameter):
                self.sweep()
                if slot.state is ARMED:
                    return slot
            if hiding:
                self._hide(slot)
            if slot.state is IDLE:
                grad = parameter.grad
                if type(grad) is not LazyGradient:
                    slot.sources, slot.dense = sources, dense
                    slot.arm(parameter, grad)
                    continue
                slot = self._joined(slot, parameter, grad)
            if owner not in slot.sources or slot.dense > dense:
                slot.sources = tuple(dict.fromkeys((*slot.sources, *sources)))
                slot.dense = slot.dense and dense
        if slot is not None:
            slot.lazy = None  # its end is noticed
            self._keep(parameters[-1], owner)
        return None

    def lift(self) -> list[Slot]:
        """Drop what is pending for every gradient that is gone, and let ``.grad`` of the others be
        what gradients are added to.
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
        """Let ``.grad`` be what it was before; the owner has forgotten all works."""
        lifted = self.lift()
        for slot in lifted:
            slot.forget()
        self.settle(lifted)

    def settle(self, lifted: Iterable[Slot], failure: BaseException | None = None) -> None:
        """What was lifted has been computed.

        Args:
            lifted: the slots.
            failure: why it could not be computed.
        """
        owner = self._owner()
        works = () if owner is None else owner.works()
        simply = not works and failure is None
        waiting: dict[Source, Collection[int]] = {}
        for slot in lifted:
            if simply and len(slot.sources) == 1 and slot.aside is None and slot.failure is None:
                slot.sources, slot.state = (), IDLE
                # As ``Slot.held``, without a call for each.
                if (
                    slot.lazy is None
                    or getrefcount(slot.lazy) > OURS
                    or tensor_users(slot.lazy) > 1
                ):
                    self._hand_over(slot)
                continue
            if failure is not None:
                slot.failure = failure
            for source in slot.sources:
                if source not in waiting:
                    waiting[source] = source.waiting()
            slot.sources = tuple([each for each in slot.sources if slot.key in waiting[each]])
            self._settle_kept(slot)
        if works:
            self._watch(works)
        else:
            self._let_go()

    def reclaim(self) -> None:
        """Keep lazy gradients that were used and that nobody holds any more."""
        used, self._used = self._used, []
        for slot in used:
            if slot.state is not USED:
                continue
            # As a rule, without calls.
            if slot.lazy is None or getrefcount(slot.lazy) > OURS or tensor_users(slot.lazy) > 1:
                slot.reuse()
            else:
                slot.lazy._real = None
                slot.state = IDLE

    def sweep(self) -> None:
        """Drop what is pending for every gradient that is gone."""
        _, held = self._present()
        for slot, _ in held:
            slot.lazy = None  # its end is noticed

    def drop(self, parameters: Collection[int]) -> None:
        """Nobody wants the gradients of these any more."""
        owner = self._owner()
        if owner is None:
            return
        empty = []
        for work in owner.works():
            work.drop(parameters)
            if not any(True for _ in work.named_parameters()):
                empty.append(work)
        owner.forget(empty)
        works = owner.works()
        self._watch(works)
        if not works:
            self._let_go()

    def _present(self) -> tuple[list[tuple[Slot, Tensor]], list[tuple[Slot, Tensor]]]:
        """Drop what is pending for every gradient that is gone.

        Returns:
            The slots of the others with their parameters: those in ``.grad``, and those that are
            not but that somebody holds.
        """
        there: list[tuple[Slot, Tensor]] = []
        held: list[tuple[Slot, Tensor]] = []
        gone: list[Slot] = []
        for slot in self._slots.values():
            if slot.state is not ARMED:
                continue
            parameter = slot.parameter()
            if parameter is None:
                gone.append(slot)
                continue
            # One that is ending, and has this called, must not be looked at in ``.grad``.
            kept = slot.lazy is not None
            if (kept and parameter.grad is slot.lazy) or slot.installed(parameter):
                there.append((slot, parameter))
            elif slot.failure is None and slot.held():
                held.append((slot, parameter))
            else:
                gone.append(slot)
        _drop(gone)
        return there, held

    def _slot(self, parameter: Tensor) -> Slot:
        """Another owner's slot, or a new one."""
        if len(self._slots) >= self._limit:
            live = {key: each for key, each in self._slots.items() if each.parameter() is not None}
            self._slots, self._limit = live, 2 * len(live) + _FEW
        slot = self._slots[id(parameter)] = Slot.of(parameter) or Slot(parameter)
        return slot

    def _joined(self, slot: Slot, parameter: Tensor, grad: LazyGradient) -> Slot:
        """The slot to use where ``.grad`` holds a lazy gradient that is not from here."""
        found = Slot.of(parameter)
        if found is not None:  # another owner's
            self._slots[id(parameter)] = found
            return found
        slot.sources, slot.dense = (), True
        slot.arm(parameter, grad.value())  # another parameter's, or one that was put back
        return slot

    def _settle_kept(self, slot: Slot) -> None:
        """Of a slot that is pending still, or whose gradient is not in ``.grad``."""
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

    def _hand_over(self, slot: Slot) -> None:
        """Who took the lazy gradient out of ``.grad`` gets the real one from it."""
        parameter, lazy = slot.parameter(), slot.current()
        if parameter is None or lazy is None:
            return
        real = lazy._real = parameter.grad
        if slot.lazy is not None and real is not None:
            slot.state = USED
            self._used.append(slot)
        else:
            slot.forget()

    def _watch(self, works: Iterable[Work]) -> None:
        """See that of each work the end of one lazy gradient is noticed."""
        for work in works:
            slots = [self._slots.get(id(parameter)) for _, parameter in work.named_parameters()]
            armed = [slot for slot in slots if slot is not None and slot.state is ARMED]
            if armed and all(slot.lazy is not None for slot in armed):
                # Whatever order they end in, half of them are then behind it, on average.
                armed[len(armed) // 2].lazy = None

    def _keep(self, parameter: Tensor, owner: Owner) -> None:
        """Let what is pending live with a parameter, also when the module it is from is gone."""
        kept = parameter.__dict__.get(_ATTRIBUTE)
        if not isinstance(kept, _Kept):
            kept = parameter.__dict__[_ATTRIBUTE] = _Kept()
        if self not in kept.owners:
            kept.owners[self] = owner
            self._keepers.append(weakref.ref(parameter))

    def _let_go(self) -> None:
        for keeper in self._keepers:
            parameter = keeper()
            kept = None if parameter is None else parameter.__dict__.get(_ATTRIBUTE)
            if parameter is not None and isinstance(kept, _Kept):
                kept.owners.pop(self, None)
                if not kept.owners:
                    del parameter.__dict__[_ATTRIBUTE]
        self._keepers.clear()


class _Kept:
    """What is pending and lives with a parameter."""

    def __init__(self) -> None:
        self.owners: dict[LazyGradients, Owner] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a parameter has no gradient; this is what any unpickler may load."""
        return OrderedDict, ()


def _drop(gone: Iterable[Slot]) -> None:
    """What is pending for these slots."""
    dropped: dict[Source, set[int]] = {}
    for slot in gone:
        for source in slot.sources:
            dropped.setdefault(source, set()).add(slot.key)
        slot.sources = ()
        slot.disarm()
        if slot.held():
            slot.forget()
    for source, keys in dropped.items():
        source.drop(keys)
