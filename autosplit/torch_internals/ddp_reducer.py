"""Refusal of FSDP, and detection of DistributedDataParallel's gradient synchronisation."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import ShardedError
from autosplit.torch_internals.autograd.accumulate_grad import hooks_put_aside

from .distributed import data_parallel, fsdp_part


def refuse_sharded(module: nn.Module) -> None:
    """FSDP gathers parameters, and reduces and frees weight gradients, in hooks that no graph has.

    Raises:
        ShardedError: FSDP manages the module or a part of it.
    """
    found = fsdp_part(module)
    if found is not None:
        name, kind = found
        where = f"{name} ({kind})" if name else kind
        raise ShardedError(
            f"FSDP (fully_shard or FullyShardedDataParallel) manages {where}, whose parameters are "
            "not whole here. A whole module that fully_shard was called with goes into "
            "autosplit.split, and into autosplit.pipelining.SplitPipelineStage for torch's "
            "schedules; elsewhere build the model without FSDP, and wrap a split module in "
            "DistributedDataParallel"
        )


def average_gradients(wrapper: DistributedDataParallel) -> None:
    """Average the ``.grad`` of all parameters over the ranks, by the reducer and its communication
    hook, as at the end of a backward.
    """
    parameters = [each for each in wrapper.module.parameters() if each.requires_grad]
    if not parameters:
        return
    wrapper.reducer.prepare_for_backward([])
    with hooks_put_aside(parameters), torch.enable_grad():
        # It takes what arrives at a parameter for the last part of its gradient.
        torch.autograd.backward(parameters, [p.new_zeros(()).expand_as(p) for p in parameters])


def synchronises() -> bool:
    """Whether a forward of DistributedDataParallel is under way whose backward is to average
    gradients over the ranks: outside ``no_sync()``.

    The reducer takes the next gradient that arrives at every parameter, once, and waits for the
    other ranks. So that backward computes weight gradients too, after everything that is pending:
    deferred, they would be averaged where each rank happens to use them first.
    """
    wrapper = data_parallel() if torch.is_grad_enabled() else None
    return wrapper is not None and bool(wrapper.require_backward_grad_sync)
