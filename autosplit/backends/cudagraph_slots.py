"""``CudaGraphSlot``: one captured copy of a graph, and the lifetime of its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from autosplit.passes.graph import Kind, Role
from autosplit.torch_internals.storage import is_gone

# What only graphs take, which do not write into it. The rest goes to users and into sums.
_CROSSING = frozenset({Kind.SAVED, Kind.DEFERRED})


class Recording(NamedTuple):
    """Captured kernels.

    Attributes:
        replay: does it again, on the memory that it was captured with.
        results: where it leaves its results.
    """

    replay: Callable[[], None]
    results: list[Any]


class _Alias(NamedTuple):
    """A result that lies in an input.

    Attributes:
        at: which input.
        like: where it lies in what was captured.
        shift: elements between the input's beginning and its own.
    """

    at: int
    like: Tensor
    shift: int

    def of(self, source: Tensor) -> Tensor:
        """The same part of the caller's tensor, whose writes are counted there."""
        size, stride = self.like.size(), self.like.stride()
        if (size, stride, self.shift) == (source.size(), source.stride(), 0):
            return source
        return source.as_strided(size, stride, source.storage_offset() + self.shift)


class CudaGraphSlot:
    """A captured copy of a graph, and its memory.

    Args:
        places: see below.
        layout: see below.
        copied: the first values of inputs that are copied, by position; others are read where
            they are.
        written: positions of inputs that are copied back afterwards.

    Attributes:
        places: addresses of parameters, buffers and constants that it reads.
        layout: how its inputs lie in memory.
        static: position of an input -> where it is copied to before a replay.
    """

    def __init__(
        self,
        places: tuple[int, ...],
        layout: tuple[Any, ...],
        copied: Mapping[int, Any],
        *,
        written: Sequence[int],
    ) -> None:
        self.places = places
        self.layout = layout
        self.static = {
            at: _like(source) for at, source in copied.items() if isinstance(source, Tensor)
        }
        self._fill(copied)  # operators that are given indices trap on wild ones
        self._written = written
        self._handed: list[Callable[[], bool]] = []

    def hold(self, recording: Recording, given: Sequence[Any], returned: Sequence[Role]) -> None:
        """Set the recording that was captured on the inputs ``given``."""
        self._replay, results = recording
        owners = {_address(t): at for at, t in enumerate(given) if isinstance(t, Tensor)}
        self._plan: list[tuple[bool, Any]] = []
        for role, result in zip(returned, results, strict=True):
            crosses, at = role.kind in _CROSSING, None
            if isinstance(result, Tensor):
                at = owners.get(_address(result)) if result.numel() else None
            if at is not None and given[at].dtype == result.dtype:
                shift = result.storage_offset() - given[at].storage_offset()
                self._plan.append((crosses, _Alias(at, result, shift)))
            else:
                mine = at is None or at in self.static
                self._plan.append((crosses and mine, result))

    @property
    def is_free(self) -> bool:
        """Whether no tensor that it handed out is alive, under any name."""
        return all(gone() for gone in self._handed)

    def run(self, sources: Sequence[Any]) -> list[Any]:
        self._fill(sources)
        self._replay()
        for at in self._written:
            sources[at].copy_(self.static[at])
        return self._hand_out(sources)

    def _fill(self, sources: Sequence[Any] | Mapping[int, Any]) -> None:
        for at, tensor in self.static.items():
            _once(tensor).copy_(_once(sources[at]))

    def _hand_out(self, sources: Sequence[Any]) -> list[Any]:
        storages: dict[tuple[bool, int], UntypedStorage] = {}
        results = []
        for crosses, result in self._plan:
            if isinstance(result, _Alias):
                results.append(result.of(sources[result.at]))
            elif isinstance(result, Tensor):
                key = crosses, _address(result)
                if key not in storages:
                    make = _same_memory if crosses else _copy
                    storages[key] = make(result.untyped_storage())
                results.append(_within(storages[key], result))
            else:
                results.append(result)
        self._handed = [is_gone(each) for (crosses, _), each in storages.items() if crosses]
        return results


def _like(source: Tensor) -> Tensor:
    return torch.empty_strided(
        source.shape, source.stride(), dtype=source.dtype, device=source.device
    )


def _once(tensor: Tensor) -> Tensor:
    """Without repetition along expanded dimensions, which no tensor can be copied into."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(storage: UntypedStorage) -> UntypedStorage:
    return _bytes_of(storage).clone().untyped_storage()


def _same_memory(storage: UntypedStorage) -> UntypedStorage:
    """A second storage over the same memory, whose reference count shows whether results that were
    handed out, or views of them, are alive.
    """
    capsule = torch.utils.dlpack.to_dlpack(_bytes_of(storage))  # type: ignore[attr-defined]
    return torch.utils.dlpack.from_dlpack(capsule).untyped_storage()


def _within(storage: UntypedStorage, like: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())
