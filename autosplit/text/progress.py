"""Show the progress of long work: as a bar on a terminal, otherwise as lines in the log or on
standard error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_LOG = logging.getLogger("autosplit")
_FIRST_PAUSE, _LATER_PAUSES = 5.0, 30.0  # seconds between messages
_NOTE_PAUSE = 0.2  # seconds between two notes of a bar


class Progress:
    """The progress of one piece of work; ``working`` creates it.

    Args:
        work: the work, as in ``"capturing Llama"``.
        total: the number of parts; None if the work is not counted.
        unit: the noun of a part, as in ``"step"``.
    """

    def __init__(self, work: str, total: int | None = None, unit: str = "") -> None:
        self._work, self._total, self._unit = work, total, unit
        self._count, self._note = 0, ""
        self._started = self._noted = time.perf_counter()
        self._bar = _bar(work, total, unit)

    def advance(self, note: Callable[[], str] | None = None) -> None:
        """Count one more part as done.

        Args:
            note: a function that returns a text to show after the count, such as ``"loss 2.31"``;
                called a few times a second at most.
        """
        self._count += 1
        now = time.perf_counter()
        if note is not None and (self._count == 1 or now - self._noted > _NOTE_PAUSE):
            self._note, self._noted = note(), now
            if self._bar is not None:
                self._bar.set_postfix_str(self._note, refresh=False)
        if self._bar is not None:
            self._bar.update()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the work began."""
        return time.perf_counter() - self._started

    @property
    def draws(self) -> bool:
        """Whether a bar shows the progress, so that no lines are needed."""
        return self._bar is not None

    def __str__(self) -> str:
        """The progress in one line, such as ``training: step 7 of 40, loss 2.31, 12 s so far, 57 s
        left``.
        """
        parts = []
        if self._count:
            of_total = "" if self._total is None else f" of {self._total}"
            parts.append(f"{self._unit} {self._count}{of_total}".lstrip())
        if self._note:
            parts.append(self._note)
        seconds = self.elapsed_seconds
        parts.append(f"{seconds:.0f} s so far")
        if self._count and self._total is not None:
            parts.append(f"{seconds / self._count * (self._total - self._count):.0f} s left")
        return f"{self._work}: " + ", ".join(parts)

    def remove_bar(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


def _bar(work: str, total: int | None, unit: str) -> Any:
    """A bar of tqdm, for counted work on rank 0's terminal; None elsewhere."""
    if not unit or not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        return None
    from tqdm import tqdm

    return tqdm(total=total, desc=work, unit=unit, leave=False, dynamic_ncols=True)


@contextlib.contextmanager
def working(work: str, total: int | None = None, unit: str = "") -> Iterator[Progress]:
    """Context that shows the progress of its work, and logs how long it took.

    Counted work has a bar on rank 0's terminal. Elsewhere, and for work that is not counted,
    messages show the progress once five seconds have passed. Messages are logged at INFO under
    ``autosplit``. If no handler takes that log, rank 0 prints the messages to standard error.

    Args:
        work: the work, as in ``"capturing Llama"``.
        total: the number of parts that ``Progress.advance`` counts; None if unknown.
        unit: the noun of a part; empty if parts are not counted.
    """
    progress, done = Progress(work, total, unit), threading.Event()

    def say_repeatedly() -> None:
        pause = _FIRST_PAUSE
        while not done.wait(pause):
            _say(str(progress))
            pause = _LATER_PAUSES

    reporter = threading.Thread(target=say_repeatedly, name="autosplit-progress", daemon=True)
    if not progress.draws:
        reporter.start()
    try:
        yield progress
    finally:
        done.set()
        if not progress.draws:
            reporter.join()
        progress.remove_bar()
        _LOG.info("%s: %.2f s", work, progress.elapsed_seconds)


def _say(text: str) -> None:
    if _LOG.hasHandlers():
        _LOG.info(text)
    elif os.environ.get("RANK", "0") == "0":
        print(f"autosplit: {text}", file=sys.stderr, flush=True)
