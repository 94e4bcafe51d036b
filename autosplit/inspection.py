"""From what a factory returned to a module and example inputs to split it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .compat import tree_flatten, tree_unflatten
from .errors import PipelineError
from .workload import Workload


def example(
    made: Any, factory: str, stages: int, stage: int, *, input_grads: bool
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A module with positional and keyword inputs.

    Args:
        made: a Workload, ``(model, args)`` or ``(model, args, kwargs)``.
        factory: its name, for messages.
        stages: for a Workload, how many stages.
        stage: for a Workload, which one.
        input_grads: whether floating-point inputs need a gradient, as in every stage of a
            pipeline but the first.

    Raises:
        PipelineError: ``made`` is something else, or there is no such stage.
    """
    if isinstance(made, Workload):
        module, args = _stage(made, stages, stage)
        kwargs: dict[str, Any] = {}
    elif (stages, stage) != (1, 0):
        raise PipelineError(
            f"{factory} returned no Workload, which alone knows stages; got stages={stages} and "
            f"stage={stage}"
        )
    else:
        module, args, kwargs = _unpack(made, factory)
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [_with_grad(leaf) if input_grads else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(leaves, spec)
    return module, args, kwargs


def _stage(workload: Workload, stages: int, stage: int) -> tuple[nn.Module, tuple[Any, ...]]:
    if not 0 <= stage < stages:
        raise PipelineError(f"no stage {stage} of {stages}; stages count from 0")
    value, _ = workload.batch_fn(0, workload.microbatch_size)
    with torch.no_grad():
        for index in range(stage):
            module = workload.stage_fn(index, stages)
            value = module(*value) if isinstance(value, tuple) else module(value)
    return workload.stage_fn(stage, stages), value if isinstance(value, tuple) else (value,)


def _unpack(made: Any, factory: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        args = made[1] if isinstance(made[1], tuple) else (made[1],)
        return made[0], args, made[2] if len(made) == 3 else {}
    came = "a module without inputs" if isinstance(made, nn.Module) else type(made).__name__
    raise PipelineError(
        f"{factory} returned {came}; return (model, args), (model, args, kwargs) or a Workload, "
        "so that there is something to trace the model with"
    )


def _with_grad(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if floating else leaf
