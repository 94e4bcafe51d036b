"""Processes that begin with what takes longest to import; nothing of autosplit is there yet."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def interpreters() -> ForkServerContext:
    """Starts processes as ``"spawn"`` does, but from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context
