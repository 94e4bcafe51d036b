"""``dw_builder``: W of a split module, for those who keep torch's own ``PipelineStage``."""

from __future__ import annotations

import math
from collections.abc import Callable

from autosplit.errors import PipelineError
from autosplit.module import SplitModule
from autosplit.torch_internals.distributed import fsdp_part


def dw_builder(module: SplitModule) -> Callable[[], Callable[[], None]]:
    """W for ``PipelineStage(module, ..., dw_builder=dw_builder(module))`` around a split module.

    Every W, and every B after its I, computes the weight gradients of the oldest microbatch that
    waits. Torch does not say whose W it wants: where a schedule runs Ws in another order than Is,
    sums are made in the order of the Is. What has nothing waiting, because the module is
    frozen or hooks had the gradients computed at once, computes nothing.

    Args:
        module: what ``autosplit.split`` returned, the stage's module itself. Its ``max_pending`` is
            lifted: the schedule says how many wait.

    Raises:
        PipelineError: it is no split module, or is sharded.
    """
    if not isinstance(module, SplitModule):
        raise PipelineError(
            f"dw_builder takes the split module of a stage, got {type(module).__name__}: split the "
            "stage's module first, module = autosplit.split(module)"
        )

    if fsdp_part(module.unsplit) is not None:
        raise PipelineError(
            "dw_builder: torch's stage takes the weight gradients of a module that fully_shard has "
            "sharded out of autograd, where those of a split module are not. Give the module "
            "itself, split or not, to autosplit.pipelining.SplitPipelineStage"
        )

    module.max_pending = math.inf

    def run() -> None:
        if module.pending:
            module.backward_weight(1)

    return lambda: run
