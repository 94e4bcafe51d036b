"""From the modules that the user gave to those that this process runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.microbatch import Part

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
StageSource: TypeAlias = "Sequence[nn.Module] | Callable[[int], nn.Module]"


def count_stages(stages: StageSource, num_stages: int | None) -> int:
    """How many stages there are.

    Raises:
        PipelineError: nothing says so, or two things say different.
    """
    if not callable(stages):
        if num_stages is not None and num_stages != len(stages):
            raise PipelineError(f"got {len(stages)} stages, but num_stages={num_stages}")
        num_stages = len(stages)
    if num_stages is None:
        raise PipelineError("with a function for stages, say how many: num_stages=N")
    if num_stages < 1:
        raise PipelineError(f"a pipeline needs at least one stage; got {num_stages}")
    return num_stages


def own_modules(
    stages: StageSource, placement: Sequence[int], rank: int, device: torch.device
) -> dict[int, nn.Module]:
    """The modules of ``rank`` by stage, built if need be, on ``device``.

    Raises:
        PipelineError: a stage is no module.
    """
    modules = {}
    for index in (index for index, owner in enumerate(placement) if owner == rank):
        module = stages(index) if callable(stages) else stages[index]
        if not isinstance(module, nn.Module):
            raise PipelineError(
                f"stage {index} must be an nn.Module; got a {type(module).__name__}"
            )
        modules[index] = module.to(device)
    return modules


def complete(
    modules: Mapping[int, nn.Module],
    last: int,
    loss_fn: LossFunction,
    targets: Part | None,
    *,
    autocast: torch.dtype | None,
    device: torch.device,
) -> dict[int, nn.Module]:
    """The modules with what the trainer adds: the loss on stage ``last``, autocast on all.

    ``targets`` is an example: it tells whether ``loss_fn`` takes a tensor or a tuple.
    """
    whole: dict[int, nn.Module] = {}
    for index, module in modules.items():
        whole[index] = module
        if index == last:
            count = None if isinstance(targets, Tensor) else len(targets or ())
            whole[index] = WithLoss(whole[index], loss_fn, count)
        if autocast is not None:
            whole[index] = WithAutocast(whole[index], device, autocast)
    return whole


class WithLoss(nn.Module):
    """The last stage: its inputs, then the targets; puts out the loss.

    Args:
        targets: how many of the arguments are targets; None if the target is one plain tensor,
            which ``loss_fn`` then gets as it is rather than in a tuple.
    """

    def __init__(self, module: nn.Module, loss_fn: LossFunction, targets: int | None) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn
        self._plain = targets is None
        self._targets = 1 if targets is None else targets

    def forward(self, *args: Tensor) -> Tensor:
        cut = len(args) - self._targets
        output = self.module(*args[:cut])
        return self.loss_fn(output, args[cut] if self._plain else args[cut:])


class WithAutocast(nn.Module):
    """Runs a module under autocast; the loss as well, where the module contains it."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self._device_type = device.type
        self._dtype = dtype

    def forward(self, *args: Tensor) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype):
            return self.module(*args)
