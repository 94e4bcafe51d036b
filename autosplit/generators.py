"""Random generators that stay as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def kept() -> AbstractContextManager[None]:
    """Put the generators back at the end: the CPU's, and those of GPUs that this process uses.

    Left to itself torch would set up every GPU of the machine, after which processes cannot be
    forked any more, and warn that there are several.
    """
    in_use = torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if in_use else []
    return torch.random.fork_rng(devices=devices)
