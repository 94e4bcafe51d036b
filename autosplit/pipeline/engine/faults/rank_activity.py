"""A rank's current phase and action, and whether it waits for others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from autosplit.errors import BatchError
from autosplit.pipeline.schedule.action import Action

AROUND = "the code around the trainer"


class RankActivity:
    """What a rank is doing: written by the thread that does it, read by the one that watches.

    Attributes:
        phase: in words.
        action: the action of the schedule, within a step.
        waiting: whether it waits for other ranks.
        turn: counts the changes of these.
        told: hears of every new phase; actions change too often.
    """

    def __init__(self) -> None:
        self.phase = AROUND
        self.action: Action | None = None
        self.waiting = False
        self.turn = 0
        self.told: Callable[[str], None] = lambda phase: None

    def __str__(self) -> str:
        action = self.action
        return self.phase if action is None else str(action)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Be in a phase. An error that ends a run leaves it as it is, to say where that was."""
        before = self.phase
        self._enter(phase)
        try:
            yield
        except BatchError:
            self._enter(before)
            raise
        self._enter(before)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.turn += 1
        self.told(phase)

    def fetch(self, action: Action | None) -> None:
        """Wait for what ``action`` needs; None: for the end of a step."""
        self.action = action
        self.waiting = True
        self.turn += 1

    def compute(self) -> None:
        """Do what was fetched for."""
        self.waiting = False
        self.turn += 1

    @contextlib.contextmanager
    def busy_with(self, action: Action) -> Iterator[None]:
        """Wait for something that no other rank has a part in."""
        before = self.action, self.waiting
        self.action, self.waiting = action, False
        self.turn += 1
        yield
        self.action, self.waiting = before
        self.turn += 1

    def leave(self) -> None:
        """Be in no action any more."""
        self.action = None
        self.waiting = False
        self.turn += 1

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Wait for other ranks."""
        before = self.waiting
        self.waiting = True
        self.turn += 1
        try:
            yield
        finally:
            self.waiting = before
            self.turn += 1
