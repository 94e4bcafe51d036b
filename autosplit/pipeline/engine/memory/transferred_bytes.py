"""Bytes that transfers bring and take away beside a rank's own thread."""

from __future__ import annotations

import threading


class TransferredBytes:
    """Counts from any thread what comes, from when its memory is made, and what has gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._highest = 0

    def change(self, more: int) -> None:
        """There are so many bytes more, or fewer."""
        with self._lock:
            self._now += more
            self._highest = max(self._highest, self._now)

    def most(self) -> int:
        """The most that there were at any time since the last call, above those at that call."""
        with self._lock:
            found = self._highest
            self._now = self._highest = 0
        return found
