"""Margin losses traced as operators, not by decompositions that round differently."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._subclasses.fake_impls import op_implementations_dict

_SINGLE = torch.ops.aten.multi_margin_loss.default
_SEVERAL = torch.ops.aten.multilabel_margin_loss_forward.default

_TABLE: dict[Any, Any] = decomposition_table


@contextlib.contextmanager
def traced_as_run() -> Iterator[None]:
    """Trace two losses as operators. torch's Python decompositions round differently from the
    kernels, and one has shape [1] for an unbatched input where the kernel has []; its meta kernel
    is that decomposition too.
    """
    taken = [(op, op.py_kernels.pop(DispatchKey.Autograd, None)) for op in (_SINGLE, _SEVERAL)]
    for op, _ in taken:
        op._dispatch_cache.clear()
    try:
        with patch.dict(op_implementations_dict, {_SEVERAL: _shapes}), patch.dict(_TABLE):
            _TABLE.pop(_SEVERAL, None)
            yield
    finally:
        for op, kernel in taken:
            if kernel is not None:
                op.py_kernels[DispatchKey.Autograd] = kernel
            op._dispatch_cache.clear()


def _shapes(
    mode: Any, op: Any, scores: Tensor, target: Tensor, reduction: int
) -> tuple[Tensor, Tensor]:
    """Fake results: a loss for each row or one for all, and a mask of target scores."""
    each = 0
    loss = scores.new_empty(scores.shape[:-1] if reduction == each else ())
    return loss, scores.new_empty(target.shape)
