"""DistributedDataParallel, FSDP and torch.distributed.pipelining around a module: found, or
refused; collectives as graphs run them.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import ShardedError, SplitError

from .autograd import without_hooks


def called_by_stage_backward() -> bool:
    """Whether a schedule of torch.distributed.pipelining that runs I and W apart is asking this
    thread for input gradients; weights it then looks for in autograd's graph.
    """
    module = sys.modules.get("torch.distributed.pipelining._backward")
    code = getattr(getattr(module, "stage_backward_input", None), "__code__", None)
    frame = sys._getframe() if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def data_parallel() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward calls this."""
    active: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return active


_FSDP_MARK = "_is_fsdp_managed_module"
"""What FSDP leaves, for Dynamo, on every module that it manages."""


def is_fsdp_managed(module: nn.Module) -> bool:
    """Whether FSDP manages the module itself; cheap enough to be asked at every call."""
    return _FSDP_MARK in module.__dict__


def fsdp_part(module: nn.Module) -> tuple[str, str] | None:
    """Name and class of the first submodule, or the module itself, that FSDP manages: by
    ``fully_shard`` (with any mesh, replicated too) or inside ``FullyShardedDataParallel``.
    """
    library = sys.modules.get("torch.distributed.fsdp")  # nothing can be sharded without it
    if library is None:
        return None
    kinds = (library.FSDPModule, library.FullyShardedDataParallel)
    for name, part in module.named_modules():
        if isinstance(part, kinds) or is_fsdp_managed(part):
            return name, type(part).__name__
    return None


def is_wrapped_by_fsdp(module: nn.Module) -> bool:
    """Whether ``FullyShardedDataParallel``, which flattens parameters, is around or in a module."""
    library = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(library, "FullyShardedDataParallel", ())
    return any(isinstance(part, kind) for part in module.modules())


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of a group's tensors, by the operators that graphs of DTensors have."""
    exchange = torch.ops._c10d_functional
    begun = exchange.all_reduce.default(tensor, "sum", group.group_name)
    total: torch.Tensor = exchange.wait_tensor.default(begun)
    return total


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a group waits for communication of tensors on a device; torch's default where its
    backend has no options.
    """
    options: Any = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether the backend of a group is "fake": this process dry-runs one of its ranks alone."""
    return str(dist.get_backend(group)) == "fake"


def store_of(group: dist.ProcessGroup) -> Any:
    """The store of a group; a new one for a fake group, whose own may keep nothing."""
    return dist.HashStore() if is_fake(group) else group.get_group_store()  # type: ignore[attr-defined]


def refuse_sharded(module: nn.Module) -> None:
    """FSDP gathers parameters, and reduces and frees weight gradients, in hooks that no graph has.

    Raises:
        ShardedError: FSDP manages the module or a part of it.
    """
    managed_part = fsdp_part(module)
    if managed_part is not None:
        name, kind = managed_part
        subject = f"{name} ({kind})" if name else kind
        raise ShardedError(
            f"FSDP (fully_shard or FullyShardedDataParallel) manages {subject}, whose parameters "
            "are not whole here. A whole module that fully_shard was called with goes into "
            "autosplit.split, and into autosplit.pipelining.SplitPipelineStage for torch's "
            "schedules; PipelineTrainer takes a function that builds and shards each stage, beside "
            "a mesh with 'dp_shard'; elsewhere build the model without FSDP, and wrap a split "
            "module in DistributedDataParallel"
        )


def average_gradients(wrapper: DistributedDataParallel) -> None:
    """Average the ``.grad`` of all parameters over the ranks, by the reducer and its communication
    hook, as at the end of a backward.
    """
    parameters = [parameter for parameter in wrapper.module.parameters() if parameter.requires_grad]
    if not parameters:
        return
    wrapper.reducer.prepare_for_backward([])
    with without_hooks(parameters), torch.enable_grad():
        # It takes what arrives at a parameter for the last part of its gradient.
        torch.autograd.backward(parameters, [p.new_zeros(()).expand_as(p) for p in parameters])


def synchronises() -> bool:
    """Whether a forward of DistributedDataParallel is under way whose backward is to average
    gradients over the ranks: outside ``no_sync()``.

    The reducer takes the next gradient that arrives at every parameter, once, and waits for the
    other ranks. So that backward computes weight gradients too, after everything that is pending:
    deferred, they would be averaged where each rank happens to use them first.

    Raises:
        SplitError: it is the first of ``static_graph=True``, whose backward is reduced in any case.
    """
    wrapper = data_parallel() if torch.is_grad_enabled() else None
    if wrapper is None or wrapper.require_backward_grad_sync:
        return wrapper is not None
    if wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued:
        raise SplitError(
            "DistributedDataParallel(static_graph=True) records its first backward and reduces it, "
            "which fails inside of no_sync(): run the first forward and backward outside of it, or "
            "leave static_graph out"
        )
    return False
