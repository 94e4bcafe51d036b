"""The device of a process group's tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where a process group's tensors are: this process's GPU if the group has NCCL, else the CPU.

    Args:
        group: None for the default one.
    """
    # The backend has another name where it was left to torch, or given for each kind of device.
    if "nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
