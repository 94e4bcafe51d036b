"""``OpenSizes``: which sizes of a module's inputs a capture leaves open."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autosplit.errors import FirstCallError, ShardedError
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.split_options import SplitOptions

Dimensions: TypeAlias = "dict[int, frozenset[int]]"
"""Place of an input leaf -> its dimensions whose sizes are left open."""

_LONGEST = 600  # characters of a reason
_SPECIAL = (0, 1)  # sizes that a graph is always captured for: they broadcast, or hold nothing


class OpenSizes:
    """Decides by the sizes that came so far, for the calls of one module.

    Args:
        options: how the graphs are run, which may be by a backend that needs all sizes.
        dynamic: None leaves open what had another size in an earlier capture; True leaves all
            sizes open at once, False none.
    """

    def __init__(self, options: SplitOptions, dynamic: bool | None = None) -> None:
        self._holds = options.holds_open_sizes
        self._dynamic = dynamic
        self._seen: dict[Hashable, list[set[int]]] = {}
        self._refused: dict[Hashable, str] = {}

    def capture(
        self,
        structure: Hashable,
        leaves: Sequence[Any],
        make: Callable[[Dimensions], SplitFunctions],
        fits: Callable[[SplitFunctions], bool],
    ) -> SplitFunctions:
        """Graphs for a call; where its sizes vary, ones for other sizes, too, if there are any.

        Args:
            structure: how the leaves make up the call.
            leaves: its inputs.
            make: captures with these sizes left open.
            fits: whether graphs fit the call.

        Raises:
            AutosplitError: what ``make`` raises with no size left open.
        """
        varying = self.of(structure, leaves)
        if varying:
            try:
                found = make(varying)
            except (FirstCallError, ShardedError):
                raise
            except Exception as error:  # torch's own too: a graph for these sizes may be there
                self._refuse(structure, f"{type(error).__name__}: {error}")
            else:
                if fits(found):
                    return found
                self._refuse(structure, "the graph does not fit the call it was captured for")
        return make({})

    def of(self, structure: Hashable, leaves: Sequence[Any]) -> Dimensions:
        """What to leave open in a capture for these inputs, whose sizes count as seen from now."""
        varying = {
            at: self._varying((structure, at, leaf.dim()), leaf)
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        }
        if not self._holds or self._dynamic is False or structure in self._refused:
            return {}
        return {at: dimensions for at, dimensions in varying.items() if dimensions}

    def _refuse(self, structure: Hashable, reason: str) -> None:
        """Leave nothing open in calls of this structure any more."""
        self._refused[structure] = " ".join(reason.split())[:_LONGEST]

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
