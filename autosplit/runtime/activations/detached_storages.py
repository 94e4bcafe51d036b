"""Storages taken out from under tensors, as bytes, and tensors made again over such bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autosplit.errors import SplitError

StorageKey = tuple[torch.device, int]
"""A storage's device and address, for as long as it is alive."""


def storage_of(tensor: Tensor) -> StorageKey:
    """Which storage a tensor lies in."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def is_part(tensor: Tensor) -> bool:
    """Whether a tensor's storage holds more than the tensor, as that of a batch does which was
    cut into microbatches.
    """
    return tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes()


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor over one storage, and not one of a subclass."""
    return type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided


class PlacedStorage(NamedTuple):
    """A storage behind tensors of a list: the places of all that lie in it, and its bytes."""

    places: tuple[int, ...]
    bytes: int


def detachable(tensors: Sequence[Any]) -> dict[StorageKey, PlacedStorage]:
    """Storages of which each tensor is its bytes, sizes and strides, and in which nobody but torch
    can write.
    """
    found: dict[StorageKey, list[int]] = {}
    sizes: dict[StorageKey, int] = {}
    for at, value in enumerate(tensors):
        if not is_plain(value):
            continue
        storage = value.untyped_storage()
        key = value.device, storage.data_ptr()
        places = found.get(key)
        if places is None:
            found[key] = [at]
            sizes[key] = storage.nbytes() if storage.resizable() else 0
        else:
            places.append(at)
        if value.is_conj() or value.is_neg():
            sizes[key] = 0
    return {key: PlacedStorage(tuple(found[key]), size) for key, size in sizes.items() if size}


def whole_storage(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as bytes."""
    blank = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return blank.set_(tensor.untyped_storage())


class StorageView(NamedTuple):
    """How a tensor lies in its storage; ``offset`` counts elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def over(self, data: Tensor) -> Tensor:
        """The same view of other bytes, which fill their storage."""
        blank = torch.empty(0, dtype=self.dtype, device=data.device)
        storage = data.untyped_storage()
        return blank.set_(storage, self.offset, self.shape, self.stride)


class DetachedStorages:
    """Storages that were taken out from under some tensors of a list."""

    def __init__(self) -> None:
        self._away: list[_Away] = []

    def __bool__(self) -> bool:
        return bool(self._away)

    def take(self, tensors: list[Any], storages: Iterable[PlacedStorage]) -> list[Tensor]:
        """Storages as bytes; None stands in the list for each tensor that lay in one."""
        found = []
        for places, size in storages:
            data = whole_storage(tensors[places[0]])
            views = [(at, StorageView.of(tensors[at])) for at in places]
            self._away.append(_Away(views, size, data.device))
            found.append(data)
            for at in places:
                tensors[at] = None
        return found

    def put_back(self, tensors: list[Any], storages: Sequence[Tensor]) -> None:
        """The tensors in their places again, over what holds the same bytes as was taken.

        Raises:
            SplitError: these are not as many bytes, on the same devices, in the same order.
        """
        if len(storages) != len(self._away) or not all(map(_fits, self._away, storages)):
            expected = [f"{each.bytes} bytes on {each.device}" for each in self._away]
            given = [_described(each) for each in storages]
            raise SplitError(
                f"expected the storages that were detached, {', '.join(expected) or 'none'}, as "
                f"torch.uint8, each filling its own; got {', '.join(given) or 'none'}"
            )
        for away, data in zip(self._away, storages, strict=True):
            for at, view in away.views:
                tensors[at] = view.over(data)
        self._away = []


class _Away(NamedTuple):
    """A storage that was taken.

    Attributes:
        views: place and view of each tensor in it.
        bytes: of the storage.
        device: where it lay.
    """

    views: list[tuple[int, StorageView]]
    bytes: int
    device: torch.device


def _fits(away: _Away, data: Tensor) -> bool:
    size = data.numel()
    return (
        size == away.bytes
        and data.dtype is torch.uint8
        and data.is_contiguous()
        and size == data.untyped_storage().nbytes()
        and data.device == away.device
    )


def _described(data: Tensor) -> str:
    if data.dtype is not torch.uint8 or not data.is_contiguous():
        return f"{list(data.shape)} of {data.dtype}"
    size = data.untyped_storage().nbytes()
    part = "" if size == data.numel() else f"{data.numel()} of "
    return f"{part}{size} bytes on {data.device}"
