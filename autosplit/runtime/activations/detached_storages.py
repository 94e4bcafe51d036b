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


def has_bytes(value: Any) -> bool:
    """Whether a value is its bytes, sizes and strides, and nobody but torch can write there."""
    return (
        is_plain(value)
        and not (value.is_conj() or value.is_neg())
        and value.untyped_storage().nbytes() > 0
        and value.untyped_storage().resizable()
    )


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

    def take(self, tensors: list[Any], groups: Iterable[Sequence[int]]) -> list[Tensor]:
        """Storages as bytes; None stands in the list for each tensor that lay in one.

        Args:
            tensors: the list.
            groups: of each storage, the places of all tensors in it.
        """
        found = []
        for places in groups:
            data = whole_storage(tensors[places[0]])
            views = [(at, StorageView.of(tensors[at])) for at in places]
            self._away.append(_Away(views, data.numel(), data.device))
            found.append(data)
            for at in places:
                tensors[at] = None
        return found

    def put_back(self, tensors: list[Any], storages: Sequence[Tensor]) -> None:
        """The tensors in their places again, over what holds the same bytes as was taken.

        Raises:
            SplitError: these are not as many bytes, on the same devices, in the same order.
        """
        expected = [f"{each.bytes} bytes on {each.device}" for each in self._away]
        given = [_described(each) for each in storages]
        if given != expected:
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


def _described(data: Tensor) -> str:
    if data.dtype is not torch.uint8 or not data.is_contiguous():
        return f"{list(data.shape)} of {data.dtype}"
    size = data.untyped_storage().nbytes()
    part = "" if size == data.numel() else f"{data.numel()} of "
    return f"{part}{size} bytes on {data.device}"
