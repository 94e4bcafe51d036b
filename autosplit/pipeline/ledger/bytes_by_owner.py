"""Bytes by owner at one moment, in distinct storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn

from autosplit.errors import AutosplitError
from autosplit.torch_internals.state import storage_sizes

from .bands import OWNERS

Source = Callable[[], Iterable[Tensor | None]]


class BytesByOwner:
    """Who holds what on one rank.

    A storage counts once, for the first of its owners in the order of ``OWNERS``.

    Args:
        sources: for owners, a call that gives the tensors that they hold now. Those of an owner
            that is not here are never counted.
        constant: owners that hold the same throughout, which are asked once.
    """

    def __init__(self, sources: Mapping[str, Source], constant: Sequence[str] = ()) -> None:
        unknown = [owner for owner in sources if owner not in OWNERS]
        if unknown:
            raise AutosplitError(f"no owner of memory {unknown[0]!r}; known: {', '.join(OWNERS)}")
        self._sources = sources
        self._known = {owner: storage_sizes(sources[owner]()) for owner in constant}

    def now(self) -> dict[str, int]:
        """Bytes by owner."""
        seen: set[tuple[object, int]] = set()
        held = dict.fromkeys(OWNERS, 0)
        for owner in OWNERS:
            sizes = self._known.get(owner)
            if sizes is None:
                source = self._sources.get(owner)
                sizes = {} if source is None else storage_sizes(source())
            for key, size in sizes.items():
                if key not in seen:
                    seen.add(key)
                    held[owner] += size
        return held


def state_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers."""
    return [t for module in modules for t in (*module.parameters(), *module.buffers())]
