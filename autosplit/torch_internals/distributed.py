"""Detect DistributedDataParallel, FSDP and torch.distributed.pipelining around a module.

Also: refuse FSDP, average gradients, and read properties of process groups.
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
    """Whether this runs inside ``stage_backward_input`` of torch.distributed.pipelining.

    torch's schedules with separate I and W call ``stage_backward_input`` for input gradients. For
    weight gradients, the schedules later search autograd's graph.
    """
    module = sys.modules.get("torch.distributed.pipelining._backward")
    code = getattr(getattr(module, "stage_backward_input", None), "__code__", None)
    frame = sys._getframe() if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def data_parallel() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running; None if no such forward is running."""
    active: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return active


FSDP_MARK = "_is_fsdp_managed_module"
"""Attribute that FSDP sets, for Dynamo, on every module that it manages."""


def is_fsdp_managed(module: nn.Module) -> bool:
    """Whether FSDP manages the module itself; cheap enough for every call."""
    return FSDP_MARK in module.__dict__


def fsdp_part(module: nn.Module) -> tuple[str, str] | None:
    """Name and class of the first part of a module that FSDP manages; None if there is none.

    The part may be the module itself. FSDP manages a module of ``fully_shard``, on any mesh, and a
    module inside of ``FullyShardedDataParallel``.
    """
    library = sys.modules.get("torch.distributed.fsdp")  # without it, no module is sharded
    if library is None:
        return None
    kinds = (library.FSDPModule, library.FullyShardedDataParallel)
    for name, part in module.named_modules():
        if isinstance(part, kinds) or is_fsdp_managed(part):
            return name, type(part).__name__
    return None


def is_wrapped_by_fsdp(module: nn.Module) -> bool:
    """Whether a module is or has a ``FullyShardedDataParallel``, which flattens parameters."""
    library = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(library, "FullyShardedDataParallel", ())
    return any(isinstance(part, kind) for part in module.modules())


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum a tensor over the ranks of a group, by the functional collectives that DTensors use."""
    exchange = torch.ops._c10d_functional
    begun = exchange.all_reduce.default(tensor, "sum", group.group_name)
    total: torch.Tensor = exchange.wait_tensor.default(begun)
    return total


def flattened_mesh(mesh: Any, names: tuple[str, ...], name: str) -> Any:
    """Flatten dimensions of a mesh into one, and return it. Afterwards ``mesh[name]`` returns the
    same mesh.
    """
    return mesh[names]._flatten(name)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Timeout of a group for communication on a device; torch's default if the backend has none."""
    options: Any = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether a group's backend is "fake", with which one process runs alone as one rank of
    many.
    """
    return str(dist.get_backend(group)) == "fake"


def store_of(group: dist.ProcessGroup) -> Any:
    """The key-value store of a group; a new one for a fake group, whose own may keep no values."""
    return dist.HashStore() if is_fake(group) else group.get_group_store()  # type: ignore[attr-defined]


def refuse_sharded(module: nn.Module) -> None:
    """Refuse a module that FSDP manages, because graphs do not run FSDP's hooks.

    FSDP's hooks gather and free parameters, and reduce weight gradients.

    Raises:
        ShardedError: FSDP manages the module or a part of it.
    """
    managed_part = fsdp_part(module)
    if managed_part is not None:
        name, kind = managed_part
        subject = f"{name} ({kind})" if name else kind
        raise ShardedError(
            f"FSDP (fully_shard or FullyShardedDataParallel) manages {subject}, whose parameters "
            "are not whole here. Pass a whole module of fully_shard to autosplit.split, or to "
            "autosplit.pipelining.SplitPipelineStage for torch's schedules; pass PipelineTrainer a "
            "model without FSDP and a mesh with 'dp_shard', along which it shards. In other "
            "places, build the model without FSDP, and wrap the split module in "
            "DistributedDataParallel"
        )


def average_gradients(wrapper: DistributedDataParallel) -> None:
    """Average the ``.grad`` of all parameters over the ranks, as DistributedDataParallel's backward
    does.

    The wrapper's reducer averages the gradients, and calls the user's communication hook.
    """
    parameters = [parameter for parameter in wrapper.module.parameters() if parameter.requires_grad]
    if not parameters:
        return
    wrapper.reducer.prepare_for_backward([])
    with without_hooks(parameters), torch.enable_grad():
        # The reducer treats the next gradient, here zeros, as the last part of a parameter's.
        torch.autograd.backward(parameters, [p.new_zeros(()).expand_as(p) for p in parameters])


def synchronises() -> bool:
    """Whether DistributedDataParallel will average gradients in the backward of the running
    forward.

    It does so outside of ``no_sync()``. The reducer accepts one gradient for each parameter, and
    then waits for the other ranks. So this backward must compute all pending weight gradients and
    then its own. Ranks would average deferred weight gradients at different times.

    Raises:
        SplitError: the forward is the first one with ``static_graph=True``, whose backward reduces
            even inside of ``no_sync()``.
    """
    wrapper = data_parallel() if torch.is_grad_enabled() else None
    if wrapper is None or wrapper.require_backward_grad_sync:
        return wrapper is not None
    if wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued:
        raise SplitError(
            "DistributedDataParallel(static_graph=True) records and reduces its first backward, "
            "which fails inside of no_sync(): run the first forward and backward outside of "
            "no_sync(), or leave out static_graph"
        )
    return False
