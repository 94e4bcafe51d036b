"""Progress of long work: in Python's log, or on the standard error if nobody handles the log."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

_LOG = logging.getLogger("autosplit")
_FIRST_PAUSE, _LATER_PAUSES = 5.0, 30.0  # seconds between messages


@contextlib.contextmanager
def working(work: str) -> Iterator[None]:
    """Log how long some work took, and report from five seconds on that it is still running.

    Messages are logged at INFO under ``autosplit``. If nobody handles that log, rank 0 prints the
    reports to the standard error.

    Args:
        work: the work, as in ``"capturing Llama"``.
    """
    started, done = time.perf_counter(), threading.Event()

    def go_on() -> None:
        patience = _FIRST_PAUSE
        while not done.wait(patience):
            _say(f"{work}: {time.perf_counter() - started:.0f} s so far")
            patience = _LATER_PAUSES

    talking = threading.Thread(target=go_on, name="autosplit-progress", daemon=True)
    talking.start()
    try:
        yield
    finally:
        done.set()
        talking.join()
        _LOG.info("%s: %.2f s", work, time.perf_counter() - started)


def _say(text: str) -> None:
    if _LOG.hasHandlers():
        _LOG.info(text)
    elif os.environ.get("RANK", "0") == "0":
        print(f"autosplit: {text}", file=sys.stderr, flush=True)
