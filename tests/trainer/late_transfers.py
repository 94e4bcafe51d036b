"""Transfers of moves that take long, each storage another time."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from autosplit.pipeline.engine.moves import Moves, PartnerMemory, TransferFuture
from autosplit.pipeline.engine.offload_target import OffloadFile
from autosplit.pipeline.ledger.bands import MemoryRecorder
from autosplit.pipeline.schedule.schedule import ActionKind

_PATIENCE = 1.0  # seconds; more than a rank takes to its next action


@contextlib.contextmanager
def late_transfers(seconds: float, seed: int = 0) -> Iterator[None]:
    """Each storage takes up to so long on its way out, and on its way in."""
    chance = random.Random(seed)

    def late(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            time.sleep(seconds * chance.random())
            return real(*arguments)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (PartnerMemory, "put"),
            (PartnerMemory, "take"),
            (OffloadFile, "put"),
            (OffloadFile, "take"),
        ):
            stack.enter_context(mock.patch.object(owner, name, late(getattr(owner, name))))
        yield


@contextlib.contextmanager
def recorded_transfers() -> Iterator[None]:
    """In recorded steps what leaves does so behind the next moment that is recorded, and what a
    rank takes in of its partner's is there before it goes on.
    """
    marks = _Marks()
    submit, mark, finish = Moves._submit, MemoryRecorder._look, MemoryRecorder.finish

    def submit_seen(moves: Moves, place: int, work: Callable[[], Any]) -> TransferFuture:
        seen, action = marks.count, moves._row[place]
        leaves = action.kind in (ActionKind.EVICT, ActionKind.OFFLOAD)

        def behind() -> Any:
            if leaves:
                marks.await_more_than(seen)
            return work()

        move = submit(moves, place, behind)
        if marks.recording and action.kind is ActionKind.ACCEPT:
            move.result(_PATIENCE)
        return move

    def mark_seen(recorder: MemoryRecorder, during: str, *arguments: Any) -> int:
        result = mark(recorder, during, *arguments)
        marks.more()
        return result

    def finish_seen(recorder: MemoryRecorder, results: Any) -> None:
        finish(recorder, results)
        marks.recording = False

    with (
        mock.patch.object(Moves, "_submit", submit_seen),
        mock.patch.object(MemoryRecorder, "_look", mark_seen),
        mock.patch.object(MemoryRecorder, "finish", finish_seen),
    ):
        yield


class _Marks:
    """Moments that a rank has recorded."""

    def __init__(self) -> None:
        self.count = 0
        self.recording = False
        self._changed = threading.Condition()

    def more(self) -> None:
        with self._changed:
            self.count += 1
            self.recording = True
            self._changed.notify_all()

    def await_more_than(self, seen: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.recording or self.count > seen, _PATIENCE)
