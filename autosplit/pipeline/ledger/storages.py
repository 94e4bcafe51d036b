"""Storages without tensors: how many hold each, and how many bytes there are in all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable


class Storage:
    """Memory of one size.

    Attributes:
        bytes: its size.
        own: whether it is gone when nobody holds it; a buffer of messages stays.
        holders: how many hold it.
    """

    __slots__ = ("bytes", "holders", "own")

    def __init__(self, size: int, *, own: bool = True) -> None:
        self.bytes = size
        self.own = own
        self.holders = 0


class Level:
    """Bytes of all storages that are held, and of the buffers.

    Attributes:
        now: bytes.
        highest: the most since ``begin``.
    """

    def __init__(self) -> None:
        self.now = self.highest = 0
        self._buffers: dict[Hashable, list[Storage]] = defaultdict(list)

    def begin(self) -> None:
        """Count the most from here on."""
        self.highest = self.now

    def note(self, more: int) -> None:
        """For a while there are so many bytes more."""
        self.highest = max(self.highest, self.now + more)

    def change(self, more: int) -> None:
        """There are so many bytes more from here on, or fewer."""
        self.now += more
        self.note(0)

    def hold(self, storages: Iterable[Storage]) -> None:
        """Another one holds each."""
        self.swap((), storages)
        self.note(0)

    def swap(self, taken: Iterable[Storage], made: Iterable[Storage]) -> None:
        """Hold what was made and let go of what was taken, in one moment."""
        made = [*made]
        for storage in made:
            if storage.own and not storage.holders:
                self.now += storage.bytes
            storage.holders += 1
        self.release(taken)

    def release(self, storages: Iterable[Storage]) -> None:
        """One of its holders lets go of each."""
        for storage in storages:
            storage.holders -= 1
            if storage.own and not storage.holders:
                self.now -= storage.bytes

    def buffer(self, key: Hashable, size: int) -> Storage:
        """A buffer that nobody holds, held by the caller: a new one where none is free."""
        for storage in self._buffers[key]:
            if not storage.holders:
                storage.holders = 1
                return storage
        made = Storage(size, own=False)
        made.holders = 1
        self._buffers[key].append(made)
        self.now += size
        self.note(0)
        return made
