"""Tensors and plain values: what can be read back from a checkpoint without running anything."""

from __future__ import annotations

import io
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import CheckpointError


def load_plain(content: bytes | Path, what: object, *, mmap: bool = False) -> Any:
    """What ``torch.save`` wrote, if it is tensors and plain values; nothing else is made or run.

    Raises:
        CheckpointError: it is something else, or damaged.
    """
    source = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except Exception as error:
        # Torch hides its reason behind advice to run what the file asks for.
        cause = error.__context__ if error.__suppress_context__ else error
        reason = str(cause).partition("\n")[0].partition(". Please")[0]
        raise CheckpointError(
            f"cannot read {what} as tensors and plain values, and nothing else is read, since that "
            f"could run code: {type(cause).__name__}: {reason}"
        ) from cause


def plain(value: Any) -> Any:
    """The same with Python's own numbers in the place of numpy's and others'."""
    if value is None or isinstance(value, bool | str | bytes | Tensor):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value) in (list, tuple, set):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {plain(key): plain(each) for key, each in value.items()}
    return value


def packed(value: Any, what: str) -> bytes:
    """``plain(value)`` as a checkpoint has it.

    Raises:
        CheckpointError: it has more than tensors and plain values.
    """
    buffer = io.BytesIO()
    try:
        torch.save(plain(value), buffer)
        load_plain(buffer.getvalue(), what)
    except Exception as error:
        raise CheckpointError(
            f"{what} has something that a checkpoint cannot have, only tensors and plain values "
            f"can be read back: {error}"
        ) from error
    return buffer.getvalue()
