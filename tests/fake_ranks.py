"""A process group without other ranks, for what only looks at graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_mesh(
    shape: tuple[int, ...] = (2,), names: tuple[str, ...] = ("tp",), *, rank: int = 0
) -> Iterator[DeviceMesh]:
    """A mesh of which this process is one rank; nothing is exchanged."""
    size = 1
    for item in shape:
        size *= item
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
