"""Plain data from one rank to the others, as messages of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .plain_data import read, written

_CPU = torch.device("cpu")


def tell_in(
    value: object, source: int, group: dist.ProcessGroup | None, device: torch.device = _CPU
) -> Any:
    """``value`` of rank ``source`` on all ranks of a group; None for the default group.

    Args:
        value: see ``plain.written``; only that of ``source`` counts.
        source: its rank in the default process group.
        group: over which to tell.
        device: of the messages.

    Raises:
        RuntimeError: a rank did not take part.
    """
    data = _packed(value if dist.get_rank() == source else None, device)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, source, group=group)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    return _unpacked(data)


def gather_in(
    value: object, group: dist.ProcessGroup | None, device: torch.device = _CPU
) -> list[Any]:
    """``value`` of every rank of a group, by rank, on all of them.

    Arguments and errors are those of ``tell_in``.
    """
    data = _packed(value, device)
    count = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    longest = max(map(int, sizes))
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(count)]
    dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - len(data))), group=group)
    return [_unpacked(row[: int(size)]) for row, size in zip(rows, sizes, strict=True)]


def _packed(value: object, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(written(value).encode()), dtype=torch.uint8).to(device)


def _unpacked(data: Tensor) -> Any:
    return read(data.cpu().numpy().tobytes())
