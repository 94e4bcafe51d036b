"""Memory and values for the parameters of one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from autosplit.errors import PlanError
from autosplit.planner.skeleton import alike, assign, named_tensors

Values: TypeAlias = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Gives the values of parameters and buffers by the model's own names."""


def materialise(
    module: nn.Module, values: Values | None, device: torch.device | str = "cpu"
) -> nn.Module:
    """Give what ``module`` has on the meta device memory and values, in place.

    Parameters that were one stay one. The rest of the module stays as it is.

    Args:
        module: a stage, or any module whose parameters and buffers have the names of the whole
            model.
        values: an ``Initialiser`` or a ``Loader``; may be None where nothing is on the meta device.
        device: where the memory is.

    Returns:
        ``module``.

    Raises:
        PlanError: there are no values.
    """
    lacking = {name: tensor for name, tensor in named_tensors(module).items() if tensor.is_meta}
    if not lacking:
        return module
    if values is None:
        raise PlanError(
            f"{', '.join(list(lacking)[:5])}{', ...' if len(lacking) > 5 else ''}: on the meta "
            "device, and nothing says which values to start with: call initialise() or load(path) "
            "on the plan before its stages are built"
        )
    first = {id(tensor): name for name, tensor in reversed(lacking.items())}
    names = [name for name, tensor in lacking.items() if first[id(tensor)] == name]
    found = values(names)
    made: dict[int, Tensor] = {}
    for name in names:
        original = lacking[name]
        with torch.no_grad():
            value = found[name].to(device=device, dtype=original.dtype)
        made[id(original)] = alike(value, original)
    for name, original in lacking.items():
        assign(module, name, made[id(original)])
    return module
