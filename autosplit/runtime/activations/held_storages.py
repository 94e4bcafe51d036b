"""Storages that one in-flight microbatch of a stage holds and nobody else does."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.dtensor import local_tensor

from .detached_storages import PlacedStorage, StorageKey, is_part, is_plain, storage_of
from .fitting import fitting, longest_needed_first
from .in_flight import InFlightMicrobatch, InFlightMicrobatches

_ORDERS = 256  # that are known at once


class HeldStorages:
    """What the in-flight microbatches of a stage hold, each alone.

    A rank asks for that between two actions, and steps are alike: what is the same as before is
    not found again.

    Args:
        owner: whose, for messages.
        saved: the microbatches between F and the backward.
        deferred: those between I and W.
    """

    def __init__(
        self, owner: str, saved: InFlightMicrobatches, deferred: InFlightMicrobatches
    ) -> None:
        self._owner = owner
        self._saved = saved
        self._deferred = deferred
        self._orders: dict[Hashable, Sequence[PlacedStorage]] = {}
        self._state: tuple[Hashable, AbstractSet[StorageKey]] = (), frozenset()

    def of(self, microbatch: int, kept: Iterable[Tensor]) -> list[Tensor]:
        """See ``Stage.held``."""
        own, others = self._find(microbatch)
        found = self._own(own, others, kept)
        return [own.residuals.whole(each.places[0]) for each in found]

    def detach(self, microbatch: int, limit: int | None, kept: Iterable[Tensor]) -> list[Tensor]:
        """See ``Stage.detach_held``."""
        own, others = self._find(microbatch)
        if own.residuals.is_away:
            raise SplitError(
                f"{self._owner}: tensors of microbatch {microbatch} are away already; put them "
                "back with attach_held() first"
            )
        return own.residuals.detach(self._own(own, others, kept, limit))

    def attach(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """See ``Stage.attach_held``."""
        own, _ = self._find(microbatch)
        try:
            own.residuals.attach(tensors)
        except SplitError as error:
            raise SplitError(f"{self._owner}: microbatch {microbatch}: {error}") from None

    def _find(self, microbatch: int) -> tuple[InFlightMicrobatch, list[InFlightMicrobatch]]:
        """A microbatch's state and those of all others."""
        here, there = self._saved, self._deferred
        if microbatch not in here:
            here, there = there, here
        if microbatch not in here:
            raise SplitError(
                f"{self._owner}: microbatch {microbatch} holds nothing that could be moved: it is "
                "neither between F and its backward nor between I and W"
            )
        return here.get(microbatch), [*here.others(microbatch), *there.others(microbatch)]

    def _own(
        self,
        microbatch: InFlightMicrobatch,
        others: Iterable[InFlightMicrobatch],
        kept: Iterable[Tensor],
        limit: int | None = None,
    ) -> Sequence[PlacedStorage]:
        """Storages that could be away for a while.

        Not of parameters, buffers and constants, nor of what several microbatches or the caller
        hold. Those that live longest come first; which of them fit into ``limit`` is said in
        ``fitting``.

        Args:
            microbatch: whose.
            others: the stage's other microbatches.
            kept: tensors of others besides.
            limit: how many bytes in all; None for as many as there are.
        """
        given = {storage_of(each) for each in map(local_tensor, kept) if is_plain(each)}
        shared = (microbatch.lent, given, self._of_state(microbatch))
        found = dict(microbatch.residuals.storages())
        for keys in (*shared, *(other.residuals.storages() for other in others)):
            for key in found.keys() & keys:
                del found[key]
        storages = tuple(found.values())
        alike = microbatch.functions, limit, storages
        order = self._orders.get(alike)
        if order is None:
            if len(self._orders) >= _ORDERS:
                self._orders.clear()
            order = self._orders[alike] = _in_order(microbatch, storages, limit)
        return order

    def _of_state(self, microbatch: InFlightMicrobatch) -> AbstractSet[StorageKey]:
        """Storages of what the microbatch reads besides; those of the last one asked for are known
        while they lie where they lay.
        """
        every = (*map(local_tensor, microbatch.state.values()), *microbatch.residuals.fixed)
        tensors = [tensor for tensor in every if is_plain(tensor)]
        places = tuple([(id(tensor), tensor.data_ptr()) for tensor in tensors])
        if places != self._state[0]:
            self._state = places, {storage_of(tensor) for tensor in tensors}
        return self._state[1]


def _in_order(
    microbatch: InFlightMicrobatch, storages: Sequence[PlacedStorage], limit: int | None
) -> Sequence[PlacedStorage]:
    """Storages of a microbatch in the order in which they go, as far as they fit."""
    name = microbatch.residuals.name
    names = {each: map(name, each.places) for each in storages}
    ordered = longest_needed_first(names, microbatch.functions.last_uses)
    if limit is None:
        return ordered
    return [ordered[place] for place in fitting([each.bytes for each in ordered], limit)]


def lent_storages(tensors: Iterable[Tensor | None]) -> frozenset[StorageKey]:
    """Storages in which tensors that were handed over are only a part."""
    return frozenset(
        storage_of(tensor)
        for tensor in tensors
        if tensor is not None and is_plain(tensor) and is_part(tensor)
    )
