"""What one graph leaves for the next, and the proof that nobody wrote into it meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .compat import versions
from .errors import SplitError

State = Mapping[str, Tensor]


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

    def zeros(self) -> Tensor:
        return self._empty().zero_()

    def conform(self, tensor: Tensor) -> Tensor:
        """The tensor with these strides, copied only where they differ."""
        return tensor if tensor.stride() == self.stride else self._empty().copy_(tensor)

    def _empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Handover:
    """Tensors from one graph to the next, with the state that the next one will read.

    A tensor written in place between the two would give wrong gradients; ``take`` compares
    autograd's write counts and refuses.
    """

    __slots__ = ("_counts", "_names", "_state", "_tensors")

    def __init__(self, names: Sequence[str], tensors: list[Tensor], state: State) -> None:
        """``names`` name the tensors; ``state`` is what the next graph reads besides."""
        self._names = (*names, *state)
        self._tensors = tensors
        self._state = tuple(state.values())
        self._counts = versions((*tensors, *self._state))

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self._tensors

    def take(self) -> list[Tensor]:
        """The tensors; this object keeps none of them.

        Raises:
            SplitError: something was written in place since the hand-over; names it.
        """
        counts = versions((*self._tensors, *self._state))
        if counts != self._counts:
            pairs = zip(self._names, counts, self._counts, strict=True)
            changed = ", ".join(name for name, now, then in pairs if now != then)
            raise SplitError(
                f"written in place between the forward and its backward: {changed}. Run the "
                "backward and backward_weight() before writing, or write into a clone."
            )
        tensors, self._tensors, self._state = self._tensors, [], ()
        return tensors


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct storage behind the tensors."""
    sizes = {
        (storage.device, storage.data_ptr()): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(sizes.values())
