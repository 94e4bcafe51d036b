"""What a figure was measured on, in a line that does not name the machine."""

from __future__ import annotations

import os
import platform

import torch


def describe(threads: int) -> str:
    """Versions, processor count and threads of a measuring process."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {cores} cores, device {device}, {threads} thread(s) a process"
    )
