"""``CostsAhead``: a second process that finds costs of a model while this one finds others."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

Find = Callable[..., Iterator[Any]]


class CostsAhead:
    """What a function finds for some keys, one after the other, in a process of its own.

    It is a new process, not a fork: threads of torch's may run in this one. It ends with this one.

    Args:
        find: a function that the new process can import; it is given the arguments and all keys,
            and yields what it finds for each key in their order.
        args: its first arguments, which can be pickled.
        keys: what it is asked for.
    """

    def __init__(self, find: Find, args: Sequence[Any], keys: Sequence[Hashable]) -> None:
        context = get_context("spawn")
        self._pipe, there = context.Pipe(duplex=False)
        self._expected = [*keys]
        self._process = context.Process(
            target=_work, args=(there, find, tuple(args), self._expected), daemon=True
        )
        self._process.start()
        there.close()  # so that its end is noticed here

    @classmethod
    def start(cls, find: Find, args: Sequence[Any], keys: Sequence[Hashable]) -> CostsAhead | None:
        """None where there is nothing to ask, no second core, or no way to tell a process what."""
        if not keys or (os.cpu_count() or 1) < 2:
            return None
        try:
            pickle.dumps((find, tuple(args)))
            return cls(find, args, keys)
        except (pickle.PicklingError, AttributeError, TypeError, OSError):
            return None

    def take(self, key: Hashable) -> Any:
        """What it found, waited for; None where it was not asked, or failed."""
        found = None
        while found is None and key in self._expected:
            try:
                value = self._pipe.recv()
            except (EOFError, OSError):
                self._expected.clear()
                break
            found = value if self._expected.pop(0) == key else None
        return found

    def close(self) -> None:
        """End the process, whatever it is at."""
        self._expected.clear()
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _work(pipe: Connection, find: Find, args: tuple[Any, ...], keys: Sequence[Hashable]) -> None:
    # What fails here fails there, too, where somebody is told.
    with contextlib.suppress(Exception):
        for found in find(*args, keys):
            pipe.send(found)
