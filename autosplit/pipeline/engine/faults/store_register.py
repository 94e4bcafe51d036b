"""What ranks leave in a store for others: which process each is, and how it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from autosplit.pipeline.engine.messages.plain_data import read, written

from .first_error import KeyValueStore
from .rank_process import Process

RETURNED = "came to the end of its program"
_LOOK_EVERY = 0.02


class Register:
    """The entries of all ranks, in a store that may end before they do."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._known: dict[int, Process] = {}

    def put(self, what: str, rank: int, text: str) -> None:
        """Leave word."""
        with contextlib.suppress(RuntimeError):
            self._store.set(_key(what, rank), text)

    def get(self, what: str, rank: int) -> str:
        """What a rank left; empty if it did not."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([_key(what, rank)]):
                return self._store.get(_key(what, rank)).decode()
        return ""

    def enter(self, rank: int, process: Process) -> None:
        """Say which process a rank is."""
        self.put("process", rank, written(process))

    def process(self, rank: int) -> Process | None:
        """Which process a rank is, once it has said so."""
        if rank not in self._known and (text := self.get("process", rank)):
            self._known[rank] = read(text)
        return self._known.get(rank)

    def ending(self, rank: int) -> str | None:
        """How a rank ended, in words: its own, else those of its process; None: it did not."""
        process = self.process(rank)
        return self.get("words", rank) or (None if process is None else process.ending())


def await_ending(register: Register, ranks: Iterable[int], seconds: float) -> Iterator[str]:
    """Which of some ranks has ended and how, as soon as one has; nothing if none does in time."""
    others = list(ranks)
    deadline = time.monotonic() + seconds
    while True:
        found = [f"rank {rank} {how}" for rank in others if (how := register.ending(rank))]
        if found or time.monotonic() > deadline:
            yield from found
            return
        time.sleep(_LOOK_EVERY)


def _key(what: str, rank: int) -> str:
    return f"autosplit/rank {rank}/{what}"
