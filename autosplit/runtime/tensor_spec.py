"""``TensorSpec``: shape, strides, dtype and device of a tensor, without its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape, strides, dtype and device of a tensor that a graph was traced with."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def at(self, value: Callable[[Any], int]) -> TensorSpec:
        """The spec with ``value`` applied to each of its sizes and strides."""
        shape, stride = map(value, self.shape), map(value, self.stride)
        return TensorSpec(torch.Size(shape), tuple(stride), self.dtype, self.device)

    def resized(self, shape: torch.Size) -> TensorSpec:
        """The spec for another shape, with the dimensions in the same order in memory and without
        gaps.
        """
        if shape == self.shape:
            return self
        stride, step = [0] * len(shape), 1
        for at in sorted(range(len(shape)), key=lambda at: (self.stride[at], -at)):
            stride[at], step = step, step * max(shape[at], 1)
        return TensorSpec(shape, tuple(stride), self.dtype, self.device)

    def memoryless(self) -> Tensor:
        """A tensor of this spec without memory."""
        blank = self._empty()
        blank.untyped_storage().resize_(0)
        return blank

    def zeros(self) -> Tensor:
        return self._empty().zero_()

    def conform(self, tensor: Tensor) -> Tensor:
        """The tensor with the strides of the spec; a copy only if its strides differ."""
        if tensor.stride() == self.stride:
            return tensor
        dense = tensor.contiguous() if self._contiguous else tensor
        return dense if dense.stride() == self.stride else self.copy(tensor)

    @cached_property
    def _contiguous(self) -> bool:
        """Whether the strides are those of a contiguous tensor."""
        blank = torch.empty(self.shape, device="meta")
        return 0 not in self.shape and blank.stride() == self.stride

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor with the strides of the spec."""
        return self._empty().copy_(tensor)

    def _empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
