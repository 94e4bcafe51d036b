"""``SpecializationCache``: captured graphs of one module, least recently used dropped first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from autosplit.runtime.functions import SplitFunctions

from .call_signature import CallSignature

_MAX_SIZES = 1024  # combinations of sizes whose calls find their graph at once


class SpecializationCache:
    """Captured graphs by signature; several may share one, and their guards tell them apart. Those
    that leave sizes open are found for other sizes, too.

    Args:
        owner: whose graphs, for the warning.
        limit: how many to keep; beyond it the one unused for longest is dropped.
    """

    def __init__(self, owner: str, limit: int) -> None:
        self._owner = owner
        self._limit = limit
        self._known: dict[CallSignature, list[SplitFunctions]] = {}
        self._last_use: dict[SplitFunctions, CallSignature] = {}  # longest unused first
        self._captured: list[SplitFunctions] = []
        self._open: dict[CallSignature, list[SplitFunctions]] = {}
        self._resized: dict[SplitFunctions, CallSignature] = {}  # oldest first
        self._warned = False

    @property
    def captured(self) -> tuple[SplitFunctions, ...]:
        """All that are kept, oldest first."""
        return tuple(self._captured)

    def find(
        self,
        signature: CallSignature,
        fits: Callable[[SplitFunctions], bool],
        leaves: Sequence[Any],
    ) -> SplitFunctions | None:
        """A graph of this signature that fits, for the sizes of these input leaves."""
        for functions in self._known.get(signature, ()):
            if fits(functions):
                self._use(functions)
                return functions
        if self._open:
            for functions in self._open.get(signature.of_any_size, ()):
                if fits(functions):
                    self._use(functions)
                    return self._resize(signature, functions, leaves)
        return None

    def _use(self, functions: SplitFunctions) -> None:
        base = functions.base
        self._last_use[base] = self._last_use.pop(base)

    def _resize(
        self, signature: CallSignature, functions: SplitFunctions, leaves: Sequence[Any]
    ) -> SplitFunctions:
        """Keep a graph under other sizes, too."""
        resized = functions.at(leaves)
        if len(self._resized) >= _MAX_SIZES:
            self._forget(next(iter(self._resized)))
        self._known.setdefault(signature, []).insert(0, resized)
        self._resized[resized] = signature
        return resized

    def _forget(self, resized: SplitFunctions) -> None:
        self._remove(self._resized.pop(resized), resized)

    def _remove(self, signature: CallSignature, functions: SplitFunctions) -> None:
        self._known[signature].remove(functions)
        if not self._known[signature]:
            del self._known[signature]

    def add(self, signature: CallSignature, functions: SplitFunctions) -> None:
        """Keep a graph, and drop another where there are too many."""
        while len(self._captured) >= self._limit:
            self._drop(next(iter(self._last_use)))
        # The newest is the most likely to fit next time.
        self._known.setdefault(signature, []).insert(0, functions)
        self._last_use[functions] = signature
        self._captured.append(functions)
        if functions.capture.sizes is not None:
            self._open.setdefault(signature.of_any_size, []).insert(0, functions)

    def _drop(self, functions: SplitFunctions) -> None:
        signature = self._last_use.pop(functions)
        self._remove(signature, functions)
        for resized in [each for each in self._resized if each.base is functions]:
            self._forget(resized)
        if functions.capture.sizes is not None:
            self._open[signature.of_any_size].remove(functions)
        self._captured.remove(functions)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._owner} needed more than {self._limit} graphs; from now on the one unused "
                "for longest is dropped, and captured again if it is needed again, which takes "
                "seconds. Pad inputs to fewer shapes, pass numbers that vary as tensors, or raise "
                "max_graphs of autosplit.split",
                stacklevel=2,
            )
