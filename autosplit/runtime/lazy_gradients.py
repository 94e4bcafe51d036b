"""The lazy gradients behind which one owner's pending work waits."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from .lazy_gradient import LazyGradient, Slot, Source, State

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

    The caller guards every call but ``reclaim`` by one lock, which the owner's ``sweep`` takes too.

    Args:
        owner: whose work waits.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self._slots: dict[int, Slot] = {}
        self._limit = _FEW
        self._used: list[tuple[Slot, LazyGradient]] = []

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
        self.reclaim()
        slots = self._slots
        slot: Slot | None = None
        for parameter in parameters:
            slot = slots.get(id(parameter))
            if slot is None or slot.state is State.IDLE or slot.parameter() is not parameter:
                slot = self._arm(parameter)
            if slot.state is State.ARMED and not slot.installed(parameter):
                self.sweep()
                if slot.state is State.ARMED:
                    return slot
                slot = self._arm(parameter)
            if owner not in slot.sources:
                slot.sources = (*slot.sources, owner)  # type: ignore[arg-type]
            slot.dense = slot.dense and dense
        if slot is not None:
            slot.lazy = None  # its end is noticed
        return None

    def _arm(self, parameter: Tensor) -> Slot:
        """The parameter's slot, where it is idle with the lazy gradient put into ``.grad``."""
        slot = Slot.of(parameter)  # another owner's, perhaps
        if slot is None:
            slot = self._slots.get(id(parameter))
            if slot is None or slot.parameter() is not parameter:
                slot = self._new(parameter)
        self._slots[id(parameter)] = slot
        if slot.state is State.IDLE:
            grad = parameter.grad
            # Another parameter's gradient may be here.
            slot.arm(parameter, grad.value() if type(grad) is LazyGradient else grad)
        return slot

    def _new(self, parameter: Tensor) -> Slot:
        if len(self._slots) >= self._limit:
            live = {key: each for key, each in self._slots.items() if each.parameter() is not None}
            self._slots, self._limit = live, 2 * len(live) + _FEW
        return Slot(parameter)

    def lift(self) -> list[Slot]:
        """Let ``.grad`` be what gradients are added to, wherever one is pending."""
        lifted = []
        for slot in self._pending():
            parameter = slot.parameter()
            if parameter is None:
                continue
            slot.state = State.COMPUTING
            lifted.append(slot)
            slot.aside = None if slot.installed(parameter) else [parameter.grad]
            parameter.grad, slot.base = slot.base, None
        return lifted

    def settle(self, lifted: Iterable[Slot], failure: BaseException | None = None) -> None:
        """What was lifted has been computed.

        Args:
            lifted: the slots.
            failure: why it could not be computed.
        """
        owner = self._owner()
        works = () if owner is None else owner.works()
        left = {id(parameter) for work in works for _, parameter in work.named_parameters()}
        for slot in lifted:
            parameter = slot.parameter()
            if parameter is None:
                continue
            slot.failure = slot.failure or failure
            if slot.key not in left:
                slot.sources = tuple([each for each in slot.sources if each is not owner])
            real, aside = parameter.grad, slot.aside
            slot.aside = None
            if slot.sources or slot.failure:
                slot.arm(parameter, real)
            else:
                slot.disarm(parameter)
                self._hand_over(slot, real)
            if aside is not None:
                (parameter.grad,) = aside
        if works:
            self._watch(works)

    def _hand_over(self, slot: Slot, real: Tensor | None) -> None:
        """Who took the lazy gradient out of ``.grad`` gets the real one from it."""
        if slot.held():
            lazy = slot.current()
            if lazy is None:
                return
            lazy._real = real
            if slot.lazy is not None and real is not None:
                self._used.append((slot, lazy))
            slot.lazy = None

    def reclaim(self) -> None:
        """Keep lazy gradients that were used and that nobody holds any more."""
        while self._used:
            slot, lazy = self._used.pop()
            if slot.state is State.IDLE and slot.lazy is None:
                slot.lazy = lazy
                del lazy
                if slot.held():
                    slot.lazy = None
                else:
                    slot.lazy._real = None

    def sweep(self) -> None:
        """Drop what is pending for every gradient that is gone."""
        owner = self._owner()
        gone: set[int] = set()
        for slot in self._pending():
            parameter = slot.parameter()
            if parameter is not None and slot.installed(parameter):
                continue
            if parameter is not None and slot.held():
                slot.lazy = None  # its end is noticed
                continue
            sources = slot.sources
            slot.disarm(parameter)
            gone.add(slot.key)
            for source in sources:
                if source is not owner:
                    source.drop({slot.key})
        if gone:
            self.drop(gone)

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
        self._watch(owner.works())

    def _watch(self, works: Iterable[Work]) -> None:
        """See that of each work the end of one lazy gradient is noticed."""
        for work in works:
            slots = [self._slots.get(id(parameter)) for _, parameter in work.named_parameters()]
            armed = [slot for slot in slots if slot is not None and slot.state is State.ARMED]
            if armed and all(slot.lazy is not None for slot in armed):
                # The next to end may be any of them: half of the others are behind it, on average.
                armed[len(armed) // 2].lazy = None

    def _pending(self) -> list[Slot]:
        owner = self._owner()
        return [
            slot
            for slot in self._slots.values()
            if slot.state is State.ARMED and (owner in slot.sources or slot.failure is not None)
        ]
