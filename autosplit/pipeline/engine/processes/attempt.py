"""Ranks that torchrun starts, and starts again, find those of the same start."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.faults.first_error import KeyValueStore

_LOOK_EVERY = 0.01


def agree_on_attempt(store: KeyValueStore, rank: int, world: int, timeout: timedelta) -> str:
    """A name of this start of all ranks, the same on all of them, which no earlier start had.

    torchrun's agents may keep one store for all starts, and count restarts each for itself: one
    whose ranks were stopped because those of another host had failed has not restarted them. So
    rank 0 chooses, and answers every rank by a token that is new with its process; what it found of
    a process that is gone, it answers in vain. Agents start no rank before all earlier ones have
    ended.

    Args:
        store: of all starts.
        rank: of this process.
        world: how many ranks there are.
        timeout: for the others to start.

    Raises:
        PipelineError: on rank 0, of ranks that did not start in time.
        DistStoreError: on the others, where rank 0 did not.
    """
    name = uuid.uuid4().hex
    if rank:
        store.set(f"token of {rank}", name)
        name = store.get(name).decode()
        store.set(f"{name} {rank}", "")
        return name
    answered: dict[int, bytes] = {}
    missing = set(range(1, world))
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        missing = {other for other in missing if not store.check([f"{name} {other}"])}
        if not missing:
            return name
        if time.monotonic() > deadline:
            said = ", ".join(map(str, sorted(missing)))
            seconds = timeout.total_seconds()
            raise PipelineError(f"ranks {said} of {world} did not start within {seconds:g} s")
        for other in missing:
            if not store.check([f"token of {other}"]):
                continue
            token = store.get(f"token of {other}")
            if answered.get(other) != token:
                store.set(token.decode(), name)
                answered[other] = token
        time.sleep(_LOOK_EVERY)
