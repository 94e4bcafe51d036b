"""``OpenSizes``: which sizes of a module's inputs a capture leaves open."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Dimensions: TypeAlias = "dict[int, frozenset[int]]"
"""Place of an input leaf -> its dimensions whose sizes are left open."""

_SPECIAL = (0, 1)  # sizes that a graph is always captured for: they broadcast, or hold nothing


class OpenSizes:
    """Decides by the sizes that came so far, for the calls of one module.

    Args:
        dynamic: None leaves open what had another size in an earlier capture; True leaves all
            sizes open at once, False none.
    """

    def __init__(self, dynamic: bool | None = None) -> None:
        self._dynamic = dynamic
        self._seen: dict[Hashable, list[set[int]]] = {}
        self._refused: dict[Hashable, str] = {}

    def of(self, structure: Hashable, leaves: Sequence[Any]) -> Dimensions:
        """What to leave open in a capture for these inputs, whose sizes count as seen from now."""
        varying = {
            at: self._varying((structure, at, leaf.dim()), leaf)
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        }
        if self._dynamic is False or structure in self._refused:
            return {}
        return {at: dimensions for at, dimensions in varying.items() if dimensions}

    def refuse(self, structure: Hashable, reason: str) -> None:
        """Leave nothing open in calls of this structure any more."""
        self._refused[structure] = reason

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why nothing is left open in some calls."""
        return tuple(dict.fromkeys(self._refused.values()))

    def _varying(self, key: Hashable, leaf: Tensor) -> frozenset[int]:
        sizes = self._seen.setdefault(key, [set() for _ in leaf.shape])
        for known, size in zip(sizes, leaf.shape, strict=True):
            known.add(size)
        return frozenset(
            at
            for at, size in enumerate(leaf.shape)
            if size not in _SPECIAL and (self._dynamic or len(sizes[at]) > 1)
        )
