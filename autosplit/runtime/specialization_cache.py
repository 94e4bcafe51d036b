"""``SpecializationCache``: captured graphs of one module, least recently used dropped first."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from .call_signature import CallSignature
from .functions import SplitFunctions


class SpecializationCache:
    """Captured graphs by signature; several may share one, and their guards tell them apart.

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
        self._warned = False

    @property
    def captured(self) -> tuple[SplitFunctions, ...]:
        """All that are kept, oldest first."""
        return tuple(self._captured)

    def find(
        self, signature: CallSignature, fits: Callable[[SplitFunctions], bool]
    ) -> SplitFunctions | None:
        """A graph of this signature that fits."""
        for functions in self._known.get(signature, ()):
            if fits(functions):
                self._last_use[functions] = self._last_use.pop(functions)
                return functions
        return None

    def add(self, signature: CallSignature, functions: SplitFunctions) -> None:
        """Keep a graph, and drop another where there are too many."""
        while len(self._captured) >= self._limit:
            self._drop(next(iter(self._last_use)))
        # The newest is the most likely to fit next time.
        self._known.setdefault(signature, []).insert(0, functions)
        self._last_use[functions] = signature
        self._captured.append(functions)

    def _drop(self, functions: SplitFunctions) -> None:
        signature = self._last_use.pop(functions)
        self._known[signature].remove(functions)
        if not self._known[signature]:
            del self._known[signature]
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
