"""Python's garbage collection while graphs are made and compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def only_new_garbage() -> Iterator[None]:
    """Have the collector look at what is made from here on, and not at all that a process with
    torch consists of: tracing allocates so much that it would go through half a million objects
    again and again, which is a sixth of a start from kept graphs. Does nothing where the process
    has frozen objects itself.
    """
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()
