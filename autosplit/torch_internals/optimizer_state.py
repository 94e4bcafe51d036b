"""How much an optimizer will keep for its parameters, before its first step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import torch
from torch import Tensor, nn

from .dtensor import local_tensor
from .storage import distinct_storage_bytes

_SIDE = 8
"""Of a tensor that stands for a parameter: what is kept for each row or element shows in it."""


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of an optimizer's state: what it has, or where it has none, what its first step makes.

    That step is run on small tensors in the parameters' place, of as many dimensions, by an
    optimizer that shares everything else. Where that fails nothing is known, and counts as none.
    """
    if optimizer is None:
        return 0
    there = distinct_storage_bytes(_tensors(optimizer))
    return there or _predicted(optimizer)


def _predicted(optimizer: torch.optim.Optimizer) -> int:
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()  # the user's are for true steps
    pairs: list[tuple[Tensor, nn.Parameter]] = []
    twin.param_groups = []
    for group in optimizer.param_groups:
        small = [_small(parameter) for parameter in group["params"]]
        pairs += zip(group["params"], small, strict=True)
        twin.param_groups.append({**group, "params": small})
    try:
        type(optimizer).step(twin)
    except Exception:  # of anybody's making
        return 0
    total = 0.0
    for parameter, stand_in in pairs:
        for value in twin.state.get(stand_in, {}).values():
            if isinstance(value, Tensor):
                share = local_tensor(parameter).numel() / stand_in.numel() if value.dim() else 1.0
                total += value.numel() * value.element_size() * share
    return int(total)


def _small(parameter: Tensor) -> nn.Parameter:
    shape = [min(side, _SIDE) for side in parameter.shape]
    small = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    small.grad = torch.zeros_like(small)
    return small


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state.values()
    return [value for each in states for value in each.values() if isinstance(value, Tensor)]
