"""Constants of graphs as bytes: small tensors that tracing made from numbers of the forward."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .archive_names import NoArchiveError, named_constant

_MOST = 1 << 24
"""Bytes of a constant that is kept."""


def is_plain(tensor: Tensor) -> bool:
    """Whether nothing but its elements, dtype and device makes up the tensor."""
    strided = tensor.layout is torch.strided and tensor.is_contiguous()
    lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return strided and not lazy and not tensor.requires_grad and not tensor.is_inference()


def describe_constant(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, dtype, device and data.

    Raises:
        NoArchiveError: it is large.
    """
    here = tensor.detach().cpu()
    size = here.numel() * here.element_size()
    if size > _MOST:
        raise NoArchiveError(f"the graphs hold a constant of {size} bytes")
    data = ctypes.string_at(here.data_ptr(), size) if size else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), dtype, str(tensor.device), data


def read_constant(shape: tuple[int, ...], dtype: str, device: str, data: bytes) -> Tensor:
    """The tensor, with memory of its own.

    Raises:
        NoArchiveError: this is no description of a tensor.
    """
    kind = named_constant(dtype)
    made = torch.empty(shape, dtype=kind)
    if made.numel() * made.element_size() != len(data):
        raise NoArchiveError(f"{len(data)} bytes for a constant of shape {list(shape)}")
    if data:
        ctypes.memmove(made.data_ptr(), data, len(data))
    return made.to(device)
