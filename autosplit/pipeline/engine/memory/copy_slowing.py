"""How much slower a rank computes while a store's thread copies."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import torch

from .host_store import HostStore

T = TypeVar("T")

_SECONDS = 0.012  # of each kind of work, alone or beside the other
_ROUNDS = 3
_WIDTH = 160  # of the matrices that are multiplied, which fit into a core's own cache
_MOST = 2**20  # bytes that are copied at once
_SLOWEST = 2.0  # what is more comes of something else that ran meanwhile


def measure_slowing(store: HostStore, piece: int) -> float:
    """Seconds by which computing takes longer, for each second that a copy takes by itself.

    About 0 where a core is idle, and 1 where copies and computation share theirs. Ranks of one host
    share its cores, too, so that all have to measure at once.

    Args:
        store: one on the CPU.
        piece: bytes of a storage.
    """
    found = []
    for _ in range(_ROUNDS):
        products = _products()
        with _Copies(store, min(piece, _MOST)) as copies:
            alone, _ = copies.in_a_second(lambda: time.sleep(_SECONDS))
            copied, beside = copies.in_a_second(_products)
        lost, taken = 1.0 - beside / products, copied / max(alone, 1e-9)
        found.append(lost / taken if taken else 0.0)
    return min(max(0.0, statistics.median(found)), _SLOWEST)


def _products() -> float:
    """How many matrix products this thread makes in a second."""
    one, other = torch.ones(2, _WIDTH, _WIDTH)
    start, made = perf_counter(), 0
    while (now := perf_counter()) - start < _SECONDS:
        torch.mm(one, other)
        made += 1
    return made / (now - start)


class _Copies:
    """A thread that puts and takes one piece after another, inside the context."""

    def __init__(self, store: HostStore, piece: int) -> None:
        self._store = store
        self._data = torch.ones(piece, dtype=torch.uint8)
        self._made = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autosplit-copies")

    def __enter__(self) -> _Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def in_a_second(self, meanwhile: Callable[[], T]) -> tuple[float, T]:
        """How many pieces it copies in a second during that, and what that gives."""
        start, made = perf_counter(), self._made
        found = meanwhile()
        return (self._made - made) / (perf_counter() - start), found

    def _run(self) -> None:
        while not self._ends.is_set():
            ticket = self._store.put(self._data)
            self._store.take(ticket, torch.empty_like(self._data))
            self._made += 1
