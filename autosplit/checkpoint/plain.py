"""Read and write tensors and plain values, the content of a checkpoint, without running code from
it.
"""

from __future__ import annotations

import io
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import CheckpointError


def load_plain(content: bytes | Path, subject: object, *, mmap: bool = False) -> Any:
    """Load a file of ``torch.save`` that has only tensors and plain values. No code in it is run.

    Raises:
        CheckpointError: the file has other content, or is damaged.
    """
    source = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except Exception as error:
        # Torch's message advises to run the code in the file; its own cause is hidden.
        cause = error.__context__ if error.__suppress_context__ else error
        reason = str(cause).partition("\n")[0].partition(". Please")[0]
        raise CheckpointError(
            f"cannot read {subject} as tensors and plain values; anything else is refused, because "
            f"reading it could run code: {type(cause).__name__}: {reason}"
        ) from cause


def plain(value: Any) -> Any:
    """The value with numbers of numpy and other libraries replaced by Python numbers."""
    if value is None or isinstance(value, bool | str | bytes | Tensor):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value) in (list, tuple, set):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def packed(value: Any, subject: str) -> bytes:
    """Serialize ``plain(value)`` for a checkpoint.

    Raises:
        CheckpointError: the value has other content than tensors and plain values.
    """
    buffer = io.BytesIO()
    try:
        torch.save(plain(value), buffer)
        load_plain(buffer.getvalue(), subject)
    except Exception as error:
        raise CheckpointError(
            f"{subject} cannot be saved: a checkpoint has tensors and plain values only, because "
            f"only these can be read back safely: {error}"
        ) from error
    return buffer.getvalue()
