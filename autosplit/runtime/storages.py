"""Storages that tensors share: they can be detached from their tensors as bytes, to be offloaded,
and attached again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

StorageKey = tuple[torch.device, int]
"""A storage's device and address, for as long as it is alive."""


def storage_of(tensor: Tensor) -> StorageKey:
    """A key that identifies a tensor's storage."""
    return tensor.device, tensor.untyped_storage().data_ptr()


_PLAIN = {Tensor, torch.nn.Parameter}


def is_plain(value: Any) -> bool:
    """Whether a value is a strided ``Tensor`` or ``Parameter``, and of no other subclass."""
    return type(value) in _PLAIN and value.layout is torch.strided


class PlacedStorage(NamedTuple):
    """A storage that tensors of a list share, as (positions of the tensors in the list, size of the
    storage in bytes).
    """

    places: tuple[int, ...]
    bytes: int


def detachable(tensors: Sequence[Any]) -> dict[StorageKey, PlacedStorage]:
    """Storages that can be detached from their tensors and attached again.

    Bytes, sizes and strides must describe each tensor fully (no conjugate or negative bit), and
    only torch may write into the storage.
    """
    positions: dict[StorageKey, list[int]] = {}
    sizes: dict[StorageKey, int] = {}
    for at, value in enumerate(tensors):
        if not is_plain(value):
            continue
        storage = value.untyped_storage()
        key = value.device, storage.data_ptr()
        places = positions.get(key)
        if places is None:
            positions[key] = [at]
            sizes[key] = storage.nbytes() if storage.resizable() else 0
        else:
            places.append(at)
        if value.is_conj() or value.is_neg():
            sizes[key] = 0
    return {key: PlacedStorage(tuple(positions[key]), size) for key, size in sizes.items() if size}


def whole_storage(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as bytes."""
    blank = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return blank.set_(tensor.untyped_storage())


class StorageView(NamedTuple):
    """A tensor's layout in its storage; ``offset`` counts elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def over(self, data: Tensor) -> Tensor:
        """Return a tensor of this layout whose storage is that of ``data``. ``data`` must be its
        whole storage.
        """
        blank = torch.empty(0, dtype=self.dtype, device=data.device)
        storage = data.untyped_storage()
        return blank.set_(storage, self.offset, self.shape, self.stride)


class DetachedStorage(NamedTuple):
    """A storage that was detached from its tensors.

    Attributes:
        views: (position, view) of each tensor in the storage.
        bytes: the size of the storage.
        device: the device of the storage.
    """

    views: list[tuple[int, StorageView]]
    bytes: int
    device: torch.device

    def is_replaced_by(self, data: Tensor) -> bool:
        """Whether ``data`` can replace the storage: it has the same size and device, and is its
        whole storage.
        """
        size = data.numel()
        return (
            size == self.bytes
            and data.dtype is torch.uint8
            and data.is_contiguous()
            and size == data.untyped_storage().nbytes()
            and data.device == self.device
        )


def storage_text(data: Tensor) -> str:
    """Size and device of a storage that is given as a tensor of bytes, for an error."""
    if data.dtype is not torch.uint8 or not data.is_contiguous():
        return f"{list(data.shape)} of {data.dtype}"
    size = data.untyped_storage().nbytes()
    part = "" if size == data.numel() else f"{data.numel()} of "
    return f"{part}{size} bytes on {data.device}"
