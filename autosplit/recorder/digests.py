"""Digests of tensors, which show whether bits are equal without holding values.

::

    words         the tensor's memory in logical order, as integers of up to 8 bytes
    sums          of 64 blocks of words, modulo 2**64: one flipped bit always changes one of them
    bits          sum of the 64 sums
    fingerprint   sum of the 64 sums, weighted by place: exchanged blocks change it
    mark          a hash of bits and fingerprint, which does not show the values of few words

While a step runs, each tensor costs few calls: its 64 sums, and its extremes if its numbers must be
finite. ``reduce`` computes the rest for all tensors at once, and only digests that are read are
hashed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple, cast

import torch
from torch import Tensor

from autosplit.torch_internals.dtensor import local_tensor, real_numbers

_BLOCKS = 64
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digest(NamedTuple):
    """The digest of a tensor; equal for equal bits, whatever the strides and the device.

    Attributes:
        shape: the sizes.
        dtype: the element type, such as ``"float32"``.
        mark: a hash of the tensor's bits, as 16 hexadecimal digits.
        finite: whether all numbers are finite, which integers always are; None if it was not
            computed.
    """

    shape: tuple[int, ...]
    dtype: str
    mark: str
    finite: bool | None


class PendingDigests:
    """Digests whose numbers are on their way to the host.

    ``queue`` starts the computation on the tensors' device, and only ``reduce`` makes the host
    wait. After ``queue``, the tensors may be freed or overwritten.

    Args:
        tensors: the first tensors to ``queue``.
    """

    def __init__(self, tensors: Iterable[Tensor | None] = ()) -> None:
        self._forms: list[tuple[torch.Size, torch.dtype, int, slice | None] | None] = []
        self._sums: list[Tensor] = []
        self._extremes: list[Tensor] = []
        self._numbers: list[list[int]] = []  # (bits, fingerprint) of each tensor
        self._bounds: list[float] = []
        self.queue(tensors)

    def queue(self, tensors: Iterable[Tensor | None], *, finite: bool = True) -> slice:
        """Start the digests of tensors, and return their places in the result of ``read``.

        Args:
            tensors: any tensors; None for one that does not exist.
            finite: whether to compute if all their numbers are finite.
        """
        start = len(self._forms)
        for tensor in tensors:
            if tensor is None:
                self._forms.append(None)
                continue
            tensor = local_tensor(tensor)
            values, place = real_numbers(tensor), None
            if finite:
                first, extremes = len(self._bounds) + len(self._extremes), _extremes(values)
                self._extremes += extremes
                place = slice(first, first + len(extremes))
            number = len(self._numbers) + len(self._sums)
            self._sums.append(_block_sums(values))
            self._forms.append((tensor.shape, tensor.dtype, number, place))
        return slice(start, len(self._forms))

    def reduce(self) -> None:
        """Copy the numbers of queued digests to the host. Call it when the device has finished its
        queued work.
        """
        if self._sums:
            sums = torch.stack(self._sums)
            self._numbers += torch.stack([sums.sum(1), sums.cumsum(1).sum(1)], 1).tolist()
            self._sums.clear()
        if self._extremes:
            self._bounds += torch.stack(self._extremes).tolist()
            self._extremes.clear()

    def read(self, places: slice = slice(None)) -> list[Digest | None]:
        """The digests in the order of the tensors; see ``reduce``."""
        self.reduce()
        return [form and self._digest(*form) for form in self._forms[places]]

    def finite(self, places: slice) -> list[bool | None]:
        """Whether all numbers of each tensor are finite; None if it is not known. Call it after
        ``reduce``.
        """
        return [form and self._is_finite(form[3]) for form in self._forms[places]]

    def numbers(self, places: slice) -> list[list[int] | None]:
        """Two numbers for each tensor, equal for equal bits. Call it after ``reduce``."""
        return [form and self._numbers[form[2]] for form in self._forms[places]]

    def _digest(
        self, shape: torch.Size, dtype: torch.dtype, number: int, place: slice | None
    ) -> Digest:
        mark = sha256(repr(self._numbers[number]).encode()).hexdigest()[:16]
        return Digest((*shape,), str(dtype).removeprefix("torch."), mark, self._is_finite(place))

    def _is_finite(self, place: slice | None) -> bool | None:
        return None if place is None else all(map(math.isfinite, self._bounds[place]))


def digest(tensor: Tensor) -> Digest:
    """The digest of a tensor; waits for its device."""
    return cast(Digest, PendingDigests([tensor]).read()[0])


def _block_sums(values: Tensor) -> Tensor:
    """The sums of 64 blocks of words, int64 [64]. Words left over are added to the first sums."""
    if values.storage_offset() * values.itemsize % 8:
        values = values.clone()
    size = values.nbytes
    if size and not size % (8 * _BLOCKS):
        return values.reshape(_BLOCKS, -1).view(torch.int64).sum(1)
    words = values.reshape(-1).view(_WORDS[values.itemsize if size % 8 else 8])
    length, left = divmod(words.numel(), _BLOCKS)
    if not length:
        return torch.constant_pad_nd(words.long(), (0, _BLOCKS - left))
    end = length * _BLOCKS
    sums = words[:end].view(_BLOCKS, length).sum(1, dtype=torch.int64)
    sums[:left].add_(words[end:])
    return sums


def _extremes(values: Tensor) -> tuple[Tensor, ...]:
    """Numbers that are finite if and only if all numbers of the tensor are; none for integers.

    For a CPU tensor, its sum if the sum is finite, which takes a third of the time. Otherwise the
    least and the greatest number, which are NaN if any number is.
    """
    if not values.is_floating_point() or not values.numel():
        return ()
    if not values.dim():
        return (values.clone(),)
    values = values if values.itemsize > 1 else values.float()
    if values.device.type == "cpu" and math.isfinite(total := values.sum()):
        return (total,)
    return torch.aminmax(values)
