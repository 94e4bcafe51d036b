"""What long work says: into Python's log, and to whoever waits for it without one."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

_LOG = logging.getLogger("autosplit")
_FIRST, _EVERY = 5.0, 30.0


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Log how long some work took; while it takes more than five seconds, say that it goes on.

    What goes on is logged, too (at INFO, under ``autosplit``); where nobody handles that log, the
    first rank prints it to the standard error.

    Args:
        what: the work, as in ``"capturing Llama"``.
    """
    started, done = time.perf_counter(), threading.Event()

    def go_on() -> None:
        patience = _FIRST
        while not done.wait(patience):
            _say(f"{what}: {time.perf_counter() - started:.0f} s so far")
            patience = _EVERY

    talking = threading.Thread(target=go_on, name="autosplit-progress", daemon=True)
    talking.start()
    try:
        yield
    finally:
        done.set()
        talking.join()
        _LOG.info("%s: %.2f s", what, time.perf_counter() - started)


def _say(text: str) -> None:
    if _LOG.hasHandlers():
        _LOG.info(text)
    elif os.environ.get("RANK", "0") == "0":
        print(f"autosplit: {text}", file=sys.stderr, flush=True)
