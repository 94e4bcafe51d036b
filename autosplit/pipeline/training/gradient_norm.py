"""The gradient norm of a model that is spread over ranks: the same bits however it is cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.torch_internals.dtensor import local_tensor

_AT_ONCE = 2**22  # elements that are converted at once, to 32 MiB


def squared_norms(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The sum of squares of each gradient, 0 without one; shape [parameters], float64, on the CPU.

    Each is a number of its parameter alone, or of this rank's part of it, whatever else is on its
    rank. Gradients that ranks have parts of a sum of are to be reduced before.
    """
    squares = [_squared(local_tensor(p.grad)) if p.grad is not None else None for p in parameters]
    found = torch.zeros(len(squares), dtype=torch.float64, device="cpu")
    there = [at for at, each in enumerate(squares) if each is not None]
    if there:
        found[there] = torch.stack([each for each in squares if each is not None]).cpu()
    return found


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


def _squared(gradient: Tensor) -> Tensor:
    values = gradient.detach()
    if values.layout is not torch.strided:  # of a sparse embedding
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    parts = values.reshape(-1).split(_AT_ONCE)
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().sum()
