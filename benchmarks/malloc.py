"""Processes that keep what was freed.

Left to itself, glibc's malloc gives memory back to the system and takes it anew, page by page, in
every step; how much depends on what happens to lie at the end of the heap.
"""

from __future__ import annotations

import os
import sys

KEEPING = {
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
"""Under which glibc's malloc gives nothing back to the system, as allocators made for training."""


def restart_keeping(module: str) -> None:
    """Start this program anew with ``KEEPING``, which malloc reads only at the start."""
    if any(name not in os.environ for name in KEEPING):
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | KEEPING)
