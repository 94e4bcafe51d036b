"""Clipping of a model's gradients, whose norm all ranks know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.torch_internals.dtensor import local_tensor


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale gradients in place by max_norm / norm if ``norm``, that of the model, is greater.

    The same rule as ``torch.nn.utils.clip_grad_norm_``, applied to this rank's share.
    """
    total: Tensor = torch.tensor(norm)
    # Of DTensors this rank's parts, which the plain number can be multiplied with.
    parts: Any = [_Part(local_tensor(each.grad)) for each in parameters if each.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(parts, max_norm, total)


class _Part(NamedTuple):
    grad: Tensor


def leaves_alone(max_norm: float, norm: float) -> bool:
    """Whether ``clip_gradients`` would multiply by exactly 1; not so for a norm that is no number.

    The formula is that of ``torch.nn.utils.clip_grads_with_norm_``, in its precision.
    """
    return bool(max_norm / (torch.tensor(norm) + 1e-6) >= 1.0)
