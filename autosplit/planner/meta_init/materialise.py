"""Materialises a stage's meta-device parameters: memory and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from autosplit.errors import PlanError

from .meta_model import alike, assign, named_tensors


class Values(Protocol):
    """Gives the values of parameters and buffers by the model's own names."""

    def __call__(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """The values of ``names``, on the CPU."""
        ...

    def replaces(self, name: str) -> bool:
        """Whether they also take the place of values that are there."""
        ...


def materialise_stage(
    module: nn.Module, values: Values | None, device: torch.device | str = "cpu"
) -> nn.Module:
    """Give what ``module`` has on the meta device memory and values, in place.

    Parameters that were one stay one.

    Args:
        module: a stage, or any module whose parameters and buffers have the names of the whole
            model.
        values: an ``Initialiser`` or ``CheckpointValues``; may be None where nothing is on the meta
            device.
        device: where the memory is. What is not on the meta device stays where it is, and only a
            ``CheckpointValues`` overwrites it.

    Returns:
        ``module``.

    Raises:
        PlanError: there are no values.
    """
    tensors = named_tensors(module)
    lacking = [name for name, tensor in tensors.items() if tensor.is_meta]
    if lacking and values is None:
        raise PlanError(
            f"{', '.join(lacking[:5])}{', ...' if len(lacking) > 5 else ''}: on the meta device, "
            "and nothing says which values to start with: call initialise() or "
            "load_checkpoint(path) on the plan before its stages are built"
        )
    if values is not None:
        chosen = {n: t for n, t in tensors.items() if t.is_meta or values.replaces(n)}
        _fill(module, chosen, values, torch.device(device))
    return module


@torch.no_grad()
def _fill(
    module: nn.Module, chosen: Mapping[str, Tensor], values: Values, device: torch.device
) -> None:
    first: dict[int, str] = {}
    for name, tensor in chosen.items():
        first.setdefault(id(tensor), name)
    found = dict(values(list(first.values())))
    made: dict[int, Tensor] = {}
    for key, name in first.items():
        original = chosen[name]
        if original.is_meta:
            made[key] = alike(torch.empty_like(original, device=device), original)
        # Taken out, so that there is one tensor twice at a time and not all of them.
        made.get(key, original).copy_(found.pop(name))
    for name, original in chosen.items():
        if original.is_meta:
            assign(module, name, made[id(original)])
