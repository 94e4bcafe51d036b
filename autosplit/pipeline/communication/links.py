"""How long a message between two ranks takes."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from autosplit.pipeline.communication.groups import Groups, losing
from autosplit.pipeline.simulation.transfer import Transfer

_LARGE = 2**23  # bytes
_ROUNDS = 20
_WARMUP = 3


def measure_transfer(groups: Groups, device: torch.device) -> Transfer:
    """The link between ranks 0 and 1, with the messages that a trainer's stages send.

    Collective, between steps; all ranks get the same.

    Args:
        groups: of two ranks or more; with one, nothing is measured and nothing takes time.
        device: where the messages live.

    Returns:
        Latency and bandwidth, with no ``message_bytes``.
    """
    if groups.ranks == 1:
        return Transfer()
    groups.connect([(0, 1)])
    small, large = (
        _one_way(groups, torch.zeros(size, dtype=torch.uint8, device=device))
        for size in (1, _LARGE)
    )
    found: tuple[float, float] = groups.gather((small, large))[0]
    small, large = found
    return Transfer(latency=small, bandwidth=_LARGE / max(large - small, 1e-9))


def _one_way(groups: Groups, tensor: Tensor) -> float:
    """Seconds from rank 0 to rank 1: half of the quickest way there and back."""
    if groups.rank > 1:
        return 0.0
    seconds = []
    for _ in range(_WARMUP + _ROUNDS):
        start = time.perf_counter()
        for sender in (0, 1):
            send = groups.isend if groups.rank == sender else groups.irecv
            work = send(tensor, 1 - groups.rank)
            if work is not None:
                with losing(f"rank {1 - groups.rank}", groups.timeout):
                    work.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[_WARMUP:]) / 2.0
