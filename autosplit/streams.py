"""Tensors that are made on one stream of a GPU and used on another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def stream_under(tensors: Iterable[Tensor | None]) -> torch.cuda.Stream | None:
    """The stream on which tensors are being made; None where none is on a GPU."""
    if not torch.cuda.is_initialized():
        return None
    device = next((t.device for t in tensors if isinstance(t, Tensor) and t.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device)


def follow(stream: torch.cuda.Stream | None, tensors: Sequence[Tensor | None]) -> None:
    """Have the current stream wait for what ``stream`` was given, and the tensors' memory for what
    the current one is given: the allocator thinks of the stream that they were made on only.
    """
    if stream is None:
        return
    current = torch.cuda.current_stream(stream.device)
    if current == stream:
        return
    current.wait_stream(stream)
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            tensor.record_stream(current)
