"""The names of functions in Dynamo's log of traced calls, left out while nobody reads it.

For each operator that it traces, Dynamo finds out which function of its file the line is in, and
reads and parses whole source files for that, before it asks whether the log is on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from unittest.mock import patch

from torch._dynamo import symbolic_convert


@contextlib.contextmanager
def without_trace_log_headers() -> Iterator[None]:
    """While a graph is traced, no source file is parsed for the log, unless the log is on."""
    log = getattr(symbolic_convert, "trace_call_log", None)
    if log is None or log.isEnabledFor(logging.DEBUG):
        yield
        return
    with patch.object(symbolic_convert, "get_funcname", _unnamed, create=True):
        yield


def _unnamed(filename: str, lineno: int) -> None:
    """Instead of Dynamo's ``get_funcname``: no name."""
