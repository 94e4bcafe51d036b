"""Storages that one in-flight microbatch of a stage holds and nobody else does."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .detached_storages import StorageKey, has_bytes, is_part, storage_of
from .in_flight import InFlightMicrobatch


def own_storages(
    microbatch: InFlightMicrobatch,
    others: Iterable[InFlightMicrobatch],
    kept: Iterable[Tensor] = (),
    limit: int | None = None,
) -> list[list[int]]:
    """Of each storage that could be away for a while, the places of the tensors in it.

    Not of parameters, buffers and constants, nor of what several microbatches or the caller hold.
    Those that live longest come first; one that does not fit into ``limit`` is passed over.

    Args:
        microbatch: whose.
        others: the stage's other microbatches.
        kept: tensors of others besides.
        limit: how many bytes in all; None for as many as there are.
    """
    shared = set(microbatch.lent)
    read = microbatch.residuals
    for tensor in (*microbatch.state.values(), *read.read[len(read.tensors) :], *kept):
        if has_bytes(tensor):
            shared.add(storage_of(tensor))
    for other in others:
        shared.update(other.residuals.storages())
    found = {key: places for key, places in read.storages().items() if key not in shared}
    uses = microbatch.functions.last_uses
    ends = {
        key: max(uses.get(read.name(place), 0) for place in places) for key, places in found.items()
    }
    ordered = [found[key] for key in sorted(found, key=lambda key: -ends[key])]
    if limit is None:
        return ordered
    fitting = []
    for places in ordered:
        size = read.storage_bytes(places[0])
        if size <= limit:
            limit -= size
            fitting.append(places)
    return fitting


def lent_storages(tensors: Iterable[Tensor | None]) -> frozenset[StorageKey]:
    """Storages in which tensors that were handed over are only a part."""
    return frozenset(
        storage_of(tensor)
        for tensor in tensors
        if tensor is not None and has_bytes(tensor) and is_part(tensor)
    )
