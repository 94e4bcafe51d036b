"""The gradient norm of a model that is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def squared_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Sum of squares of the gradients; parameters without one count for nothing."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) ** 2


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale gradients in place by max_norm / norm if ``norm``, that of the model, is greater.

    The same rule as ``torch.nn.utils.clip_grad_norm_``, applied to this rank's share.
    """
    total: Tensor = torch.tensor(norm)
    torch.nn.utils.clip_grads_with_norm_(list(parameters), max_norm, total)


def leaves_alone(max_norm: float, norm: float) -> bool:
    """Whether ``clip_gradients`` would multiply by exactly 1; not so for a norm that is no number.

    The formula is that of ``torch.nn.utils.clip_grads_with_norm_``, in its precision.
    """
    return bool(max_norm / (torch.tensor(norm) + 1e-6) >= 1.0)
