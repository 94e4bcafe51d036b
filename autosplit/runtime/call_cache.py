"""``CallCache`` keeps results of earlier calls of a module for later calls, up to a number of
entries.

    call of a stage ──► sizes ──────► layout of the inputs                StageSpecializations
    any call ─────────► signature ──► graphs, once their guards hold      Specializations
    graphs ───────────► sizes ──────► the same graphs at these sizes      SplitFunctions

The three caches are separate, because their entries are valid for different times. A layout, and a
graph at some sizes, depend on sizes alone and are always valid. Graphs under a signature are valid
if their guards hold, which each call checks.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_CALLS = 1024
"""Number of calls, or combinations of sizes, that one cache has."""


class CallCache(dict[K, V]):
    """A dictionary of at most ``MAX_CALLS`` keys, filled by ``remember``.

    If the dictionary is full, a new key empties it first: when so many sizes occur, few of them
    occur again.
    """

    def remember(self, key: K, value: V) -> V:
        """Store a value under a key, and return the value."""
        if len(self) >= MAX_CALLS and key not in self:
            self.clear()
        self[key] = value
        return value
