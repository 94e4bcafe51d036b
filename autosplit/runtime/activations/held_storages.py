"""Storages that one in-flight microbatch of a stage holds and nobody else does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.dtensor import local_tensor

from .detached_storages import StorageKey, has_bytes, is_part, storage_of
from .fitting import fitting, longest_needed_first
from .in_flight import InFlightMicrobatch, InFlightMicrobatches


class HeldStorages:
    """What the in-flight microbatches of a stage hold, each alone.

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

    def of(self, microbatch: int, kept: Iterable[Tensor]) -> list[Tensor]:
        """See ``Stage.held``."""
        own, others = self._find(microbatch)
        places = own_storages(own, others, kept)
        return [own.residuals.whole(each[0]) for each in places]

    def detach(self, microbatch: int, limit: int | None, kept: Iterable[Tensor]) -> list[Tensor]:
        """See ``Stage.detach_held``."""
        own, others = self._find(microbatch)
        if own.residuals.is_away:
            raise SplitError(
                f"{self._owner}: tensors of microbatch {microbatch} are away already; put them "
                "back with attach_held() first"
            )
        return own.residuals.detach(own_storages(own, others, kept, limit))

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


def own_storages(
    microbatch: InFlightMicrobatch,
    others: Iterable[InFlightMicrobatch],
    kept: Iterable[Tensor] = (),
    limit: int | None = None,
) -> list[list[int]]:
    """Of each storage that could be away for a while, the places of the tensors in it.

    Not of parameters, buffers and constants, nor of what several microbatches or the caller hold.
    Those that live longest come first; which of them fit into ``limit`` is said in ``fitting``.

    Args:
        microbatch: whose.
        others: the stage's other microbatches.
        kept: tensors of others besides.
        limit: how many bytes in all; None for as many as there are.
    """
    shared = set(microbatch.lent)
    read = microbatch.residuals
    others_have = (*microbatch.state.values(), *read.read[len(read.tensors) :], *kept)
    for tensor in map(local_tensor, others_have):
        if has_bytes(tensor):
            shared.add(storage_of(tensor))
    for other in others:
        shared.update(other.residuals.storages())
    found = {key: places for key, places in read.storages().items() if key not in shared}
    names = {key: map(read.name, places) for key, places in found.items()}
    last_uses = microbatch.functions.last_uses
    ordered = [found[key] for key in longest_needed_first(names, last_uses)]
    if limit is None:
        return ordered
    sizes = [read.storage_bytes(places[0]) for places in ordered]
    return [ordered[place] for place in fitting(sizes, limit)]


def lent_storages(tensors: Iterable[Tensor | None]) -> frozenset[StorageKey]:
    """Storages in which tensors that were handed over are only a part."""
    return frozenset(
        storage_of(tensor)
        for tensor in tensors
        if tensor is not None and has_bytes(tensor) and is_part(tensor)
    )
