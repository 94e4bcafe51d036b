"""Python's garbage collector during tracing and compilation."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextvars import ContextVar

_FROZEN = ContextVar("frozen by a context around this one", default=False)


@contextlib.contextmanager
def collecting_new_objects_only() -> Iterator[None]:
    """Freeze the objects that exist, so that the collector looks only at those made inside, and
    collect what is left of them in the end: tracing leaves tensors in cycles.

    Tracing allocates so much that it would go through the half a million objects of a process with
    torch again and again. Does nothing where the process has frozen objects itself.
    """
    # Counting frozen objects goes through all of them.
    if _FROZEN.get() or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    outer = _FROZEN.set(True)
    try:
        yield
    finally:
        _FROZEN.reset(outer)
        # Whoever looks for leaks (gc.DEBUG_SAVEALL) is to be told of others than these.
        flags = gc.get_debug()
        gc.set_debug(0)
        gc.collect()
        gc.set_debug(flags)
        gc.unfreeze()
