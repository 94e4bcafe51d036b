"""Strides of the gradients of outputs that overlap themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

from autosplit.passes.analysis.aliasing import overlaps_itself


@contextlib.contextmanager
def gradients_apart() -> Iterator[None]:
    """torch expects the gradient of an output to lie as the output does, and copies it there. Of
    an output whose elements share memory (``unfold``, ``as_strided``) elements of the gradient
    would then overwrite each other, so that is expected to be contiguous. (torch 2.13 does the
    same by itself for ``expand`` only.)
    """
    guess = MemoryFormatMeta.from_tensor

    def apart(tensor: Tensor, *args: Any, **kwargs: Any) -> MemoryFormatMeta | None:
        guessed = guess(tensor, *args, **kwargs)
        if guessed is None or guessed.memory_format is not None or not overlaps_itself(tensor):
            return guessed
        return MemoryFormatMeta(memory_format=torch.contiguous_format)

    with patch.object(MemoryFormatMeta, "from_tensor", staticmethod(apart)):
        yield
