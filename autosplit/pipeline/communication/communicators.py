"""Waits for a device that end when another rank fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from autosplit.pipeline.communication.faults import Guard


def await_device(device: torch.device, guard: Guard, timeout: float) -> None:
    """Wait on the host until a GPU has done what it was given so far. Whoever then reads a number
    from it does not wait, which nothing would end if a message on the device never came.

    Raises:
        LostPeerError: another rank failed, or ``timeout`` seconds passed.
    """
    if device.type == "cuda":
        guard.wait(torch.cuda.current_stream(device).query, timeout)
