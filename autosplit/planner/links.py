"""How long a message between two ranks takes."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PlanError
from autosplit.pipeline.groups import Groups
from autosplit.pipeline.launch import launch
from autosplit.pipeline.transfer import Transfer

_LARGE = 2**23  # bytes
_ROUNDS = 20
_WARMUP = 3
_TIMEOUT = 60.0


def profile_transfer() -> Transfer:
    """The link between two processes of this machine, over gloo.

    Starting them takes seconds; ranks that are there already can call ``measure_link``.

    Returns:
        Latency and bandwidth, with no ``message_bytes``.
    """
    return launch(measure_link, 2, timeout=_TIMEOUT)[0]


def measure_link() -> Transfer:
    """The link between ranks 0 and 1, with the messages that a trainer's stages send.

    Collective over the default process group; all ranks get the same.

    Raises:
        PlanError: there is only one rank.
    """
    if dist.get_world_size() < 2:
        raise PlanError("a link joins two ranks, and the default process group has one")
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    groups = Groups(dist.get_world_size(), device, _TIMEOUT)
    try:
        small, large = (
            _one_way(groups, torch.zeros(size, dtype=torch.uint8, device=device))
            for size in (1, _LARGE)
        )
        found: tuple[float, float] = groups.gather((small, large))[0]
    finally:
        groups.destroy()
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
                work.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[_WARMUP:]) / 2.0
