"""Receive buffers, reused as soon as nobody holds a tensor in them any more.

A received activation lives in the stage that took it until its backward, and whoever keeps it
longer (a user's list, another stage, a message that passes it on) keeps it alive by its storage,
whatever view of it they hold. So memory is free when its storage has no users but this pool. A
schedule then settles at as many buffers as it has in flight at most; no step after the first makes
one, unless somebody kept one.

On CUDA a buffer is used again only under the stream under which it was made. A receive starts
behind all that this stream was given before, so it cannot overtake a kernel that still reads; work
that a stage gives another stream must be waited for by this one before the stage lets go.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from autosplit.torch_internals.storage import storage_users

from .shape_negotiation import TensorMeta

_Key = tuple[torch.Size, torch.dtype, int]


class Buffers:
    """The buffers of one rank under one schedule.

    Attributes:
        made: how many were made so far.

    Args:
        device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.made = 0
        self._device = device
        self._rings: dict[_Key, deque[_Buffer]] = {}

    def take(self, meta: TensorMeta) -> Tensor:
        """A contiguous tensor in memory that nobody else has; what it holds means nothing."""
        ring = self._rings.setdefault((meta.shape, meta.dtype, self._stream()), deque())
        for _ in range(len(ring)):
            buffer = ring[0]
            ring.rotate(-1)  # what was used last is asked last: it is the least likely to be free
            if buffer.is_free():
                return buffer.tensor()
        self.made += 1
        ring.append(_Buffer(meta, self._device))
        return ring[-1].tensor()

    @property
    def tensors(self) -> list[Tensor]:
        """One over each buffer, whoever uses it."""
        return [buffer.tensor() for ring in self._rings.values() for buffer in ring]

    def settle(self) -> None:
        """At the end of a step, leave what is still in use to those who use it."""
        for key, ring in self._rings.items():
            if not all(buffer.is_free() for buffer in ring):
                self._rings[key] = deque(buffer for buffer in ring if buffer.is_free())

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return torch.cuda.current_stream(self._device).cuda_stream


class _Buffer:
    """One piece of memory, and the tensors over it that were handed out."""

    def __init__(self, meta: TensorMeta, device: torch.device) -> None:
        with torch.inference_mode(False):  # or it could never be written outside of that mode
            self._tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        self._storage = self._tensor.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._alone = self._users()

    def is_free(self) -> bool:
        """Whether nobody else has a tensor, a view or the storage, and it was not shrunk."""
        return self._users() == self._alone and self._storage.nbytes() == self._bytes

    def tensor(self) -> Tensor:
        """A tensor of its own over the memory."""
        return self._tensor.data

    def _users(self) -> tuple[int, int]:
        return storage_users(self._storage)
