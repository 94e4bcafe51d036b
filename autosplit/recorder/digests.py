"""Digests of tensors, which show whether bits are equal without holding values.

::

    words         the tensor's memory in logical order, as integers of up to 8 bytes
    bits          sum of all words modulo 2**64: one flipped bit always changes it
    fingerprint   sum of about 64 words, weighted by place: exchanged parts change it
    mark          a hash of both, which does not show the values of a tensor of few words
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autosplit.torch_internals.dtensor import local_tensor

_SAMPLES = 64
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digest(NamedTuple):
    """The digest of a tensor; equal for equal bits, whatever the strides and the device.

    Attributes:
        shape: the sizes.
        dtype: the element type, such as ``"float32"``.
        mark: a hash of the tensor's bits, as 16 hexadecimal digits.
        finite: whether all numbers are finite, which integers always are.
    """

    shape: tuple[int, ...]
    dtype: str
    mark: str
    finite: bool


class PendingDigests:
    """Digests whose numbers are on their way to the host.

    The constructor queues the computation on the tensors' device, and only ``read`` makes the host
    wait. After the constructor, the tensors may be freed or overwritten.

    Args:
        tensors: any tensors; None for one that does not exist.
    """

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        locals_ = [None if tensor is None else local_tensor(tensor) for tensor in tensors]
        self._forms = [t if t is None else (tuple(t.shape), _name(t.dtype)) for t in locals_]
        rows = [_numbers(tensor) for tensor in locals_ if tensor is not None]
        self._numbers = torch.stack(rows) if rows else torch.empty(0, 3)
        if self._numbers.device.type != "cpu":
            self._numbers = self._numbers.to("cpu", non_blocking=True)

    def read(self) -> list[Digest | None]:
        """The digests in the order of the tensors. Call it when the device has finished its queued
        work.
        """
        numbers = iter(self._numbers.tolist())
        return [form and _digest(form, next(numbers)) for form in self._forms]


def digest(tensor: Tensor) -> Digest:
    """The digest of a tensor; waits for its device."""
    tensor = local_tensor(tensor)
    return _digest((tuple(tensor.shape), _name(tensor.dtype)), _numbers(tensor).tolist())


def _digest(form: tuple[tuple[int, ...], str], numbers: Sequence[int]) -> Digest:
    *sums, finite = numbers
    return Digest(*form, sha256(repr(sums).encode()).hexdigest()[:16], bool(finite))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def _numbers(tensor: Tensor) -> Tensor:
    """(bits, fingerprint, is finite) as one tensor of int64, shape [3], on the tensor's device."""
    values = _flat(tensor)
    words = _words(values)
    fingerprint = words[:: max(1, words.numel() // _SAMPLES)].cumsum(0, dtype=torch.int64).sum()
    return torch.stack([words.sum(dtype=torch.int64), fingerprint, _is_finite(values)])


def _flat(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in logical order, contiguous, shape [n]; for a sparse tensor, its
    values.
    """
    values: Any = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat: Tensor = values.resolve_neg().contiguous().view(-1)
    return flat


def _words(values: Tensor) -> Tensor:
    if values.nbytes % 8:
        return values.view(_WORDS[values.itemsize])
    if values.storage_offset() * values.itemsize % 8:
        values = values.clone()
    return values.view(torch.int64)


def _is_finite(values: Tensor) -> Tensor:
    if not values.is_floating_point() or not values.numel():
        return torch.ones((), dtype=torch.int64, device=values.device)
    extremes = torch.aminmax(values if values.itemsize > 1 else values.float())
    return (extremes.min.isfinite() & extremes.max.isfinite()).to(torch.int64)
