"""``Residuals``: tensors that one graph saves for the next, checked for writes in between.

Storages can be taken out from under them, as bytes, and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autosplit.device import follow, has_accelerator, stream_under
from autosplit.errors import SplitError
from autosplit.passes.lowering import codegen
from autosplit.torch_internals.autograd import any_referenced
from autosplit.torch_internals.state import allows_other_memory, versions

StorageKey = tuple[torch.device, int]
"""A storage's device and address, for as long as it is alive."""


def storage_of(tensor: Tensor) -> StorageKey:
    """Which storage a tensor lies in."""
    return tensor.device, tensor.untyped_storage().data_ptr()


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


State = Mapping[str, Tensor]

_NUMBERS = (int, float, bool)
_POINTER, _DTYPE = methodcaller("data_ptr"), attrgetter("dtype")


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
        """The spec with what ``value`` gives for each of its sizes and strides."""
        shape, stride = map(value, self.shape), map(value, self.stride)
        return TensorSpec(torch.Size(shape), tuple(stride), self.dtype, self.device)

    def resized(self, shape: torch.Size) -> TensorSpec:
        """The spec for other sizes, the dimensions in the same order in memory, without gaps."""
        if shape == self.shape:
            return self
        stride, step = [0] * len(shape), 1
        for at in sorted(range(len(shape)), key=lambda at: (self.stride[at], -at)):
            stride[at], step = step, step * max(shape[at], 1)
        return TensorSpec(shape, tuple(stride), self.dtype, self.device)

    def memoryless(self) -> Tensor:
        """A tensor like this, without memory."""
        blank = self._empty()
        blank.untyped_storage().resize_(0)
        return blank

    def zeros(self) -> Tensor:
        return self._empty().zero_()

    def conform(self, tensor: Tensor) -> Tensor:
        """The tensor with these strides, copied only where they differ."""
        if tensor.stride() == self.stride:
            return tensor
        found = tensor.contiguous() if self._contiguous else tensor
        return found if found.stride() == self.stride else self.copy(tensor)

    @cached_property
    def _contiguous(self) -> bool:
        """Whether a contiguous tensor has these strides."""
        blank = torch.empty(self.shape, device="meta")
        return 0 not in self.shape and blank.stride() == self.stride

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy with these strides."""
        return self._empty().copy_(tensor)

    def _empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Constants(NamedTuple):
    """Tensors that graphs hold: of the module, but neither parameters nor buffers.

    Attributes:
        names: for each, where the module's forward finds it.
        tensors: the module's own, so that what is written into one is seen in the graphs.
    """

    names: tuple[str, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls, modules: Iterable[fx.GraphModule], name_of: Callable[[Tensor], str | None]
    ) -> Constants:
        """The constants that some graphs read.

        Args:
            modules: the graphs.
            name_of: where the forward finds a tensor; None for one that tracing made.
        """
        held = {k: v for module in modules for k, v in codegen.constants(module).items()}
        found = {k: v for k, v in held.items() if isinstance(v, Tensor)}
        names = [name_of(tensor) or target for target, tensor in found.items()]
        return cls(tuple(names), tuple(found.values()))


@dataclasses.dataclass(eq=False)
class BoundaryLayout:
    """What is known of all that one graph leaves for the next: settled once, for every call.

    Attributes:
        names: of the tensors, and then of the state that the next graph reads.
        constants: those that the next graph, or one after it, holds.
        exposed: places of tensors that others than graphs can write into.
        donated: places of tensors that the next graph may write over.
        late: whether the next graph is W.
    """

    names: tuple[str, ...]
    constants: Constants = Constants()  # noqa: RUF009 (immutable)
    exposed: Sequence[int] = ()
    donated: Sequence[int] = ()
    late: bool = False

    def __post_init__(self) -> None:
        self.on_streams = has_accelerator()

    def watched(self, tensors: int) -> Sequence[str]:
        """Names of what nobody may write into; ``tensors``: how many the names begin with."""
        fixed = self.names[tensors:] + self.constants.names
        return [*(self.names[at] for at in self.exposed), *fixed]

    @property
    def when(self) -> str:
        """Between which calls nothing may be written."""
        if self.late:
            return "backward() and backward_weight()"
        return "the forward and its backward"

    @property
    def first(self) -> str:
        """What comes before one may."""
        return "Call backward_weight()" if self.late else "Run the backward"


class Residuals:
    """Tensors, and numbers read from data, saved by one graph for the next, with the state and
    constants that it will read.

    A tensor written in place between the two would give wrong gradients, and so would a
    parameter whose data were exchanged (``.to()``, ``parameter.data = ...``), which autograd
    does not count as a write. ``take`` compares and refuses. What only graphs have seen nobody can
    write into.

    Attributes:
        state: parameters and buffers that are read.
        away: what is detached.
    """

    __slots__ = (
        "_counts",
        "_known",
        "_places",
        "_storages",
        "_stream",
        "_tensors",
        "_watched",
        "away",
        "state",
    )

    def __init__(
        self, known: BoundaryLayout, tensors: list[Any], state: tuple[Tensor, ...]
    ) -> None:
        """``state`` is what the next graph reads besides: parameters and buffers."""
        self._known, self._tensors, self.state = known, tensors, state
        # State and constants that must stay as they are.
        held = known.constants.tensors
        self._watched = state + held if held else state
        self._counts = versions(chain(map(tensors.__getitem__, known.exposed), self._watched))
        self._places = tuple(map(_POINTER, self._watched)), tuple(map(_DTYPE, self._watched))
        self._stream = stream_under(tensors) if known.on_streams else None
        self.away: list[_Away] = []
        self._storages: Mapping[StorageKey, PlacedStorage] | None = None

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Without the numbers; None where a kernel gave nothing."""
        return [value for value in self._tensors if not isinstance(value, _NUMBERS)]

    @property
    def fixed(self) -> tuple[Tensor, ...]:
        """State and constants that the next graph, or one after it, reads."""
        return (*self.state, *self._known.constants.tensors)

    def drop_tensors(self) -> None:
        """Release the tensors: autograd keeps them, packed by the user's hooks."""
        self._storages = None
        self._tensors = [v if isinstance(v, _NUMBERS) else None for v in self._tensors]

    def restore_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Restore the tensors as the user's hooks unpacked them."""
        given = iter(tensors)
        back = [v if isinstance(v, _NUMBERS) else next(given) for v in self._tensors]
        self._tensors = self._apart(back)  # the hooks may keep what they gave
        self._recount()

    def is_shared(self, place: int) -> bool:
        """Whether others than torch can write into the tensor's memory: NumPy, other processes."""
        return is_shared(self._tensors[place])

    def own(self, places: Collection[int]) -> None:
        """Copy the tensors at these places, whose memory is somebody else's to write into."""
        if not places:
            return
        self._tensors = own(self._tensors, places)
        self._recount()

    def copy_reachable(self, places: Iterable[int]) -> None:
        """Copy those of the tensors at these places that anybody else can reach, who may write into
        them where no version counter sees it: through NumPy, DLPack, ``.data``.

        Raises:
            SplitError: one was written in place since the hand-over.
        """
        tensors = self._tensors
        there = [at for at in places if tensors and isinstance(tensors[at], Tensor)]
        held = [at for at in there if any_referenced(map(tensors.__getitem__, (at,)))]
        if held:
            self._check_unwritten()
            self.own(held)

    def storages(self) -> Mapping[StorageKey, PlacedStorage]:
        """Storages that could be detached; looked for once, as each microbatch asks for those of
        all others.
        """
        if self._storages is None:
            self._storages = detachable(self._tensors)
        return self._storages

    def whole(self, place: int) -> Tensor:
        """The storage of the tensor at a place, as bytes."""
        return whole_storage(self._tensors[place])

    def detach(self, storages: Iterable[PlacedStorage]) -> list[Tensor]:
        """Give away some of ``storages()``, as bytes.

        Raises:
            SplitError: something was written in place since the hand-over.
        """
        self._check_unwritten()
        found = []
        for places, size in storages:
            data = whole_storage(self._tensors[places[0]])
            views = [(at, StorageView.of(self._tensors[at])) for at in places]
            self.away.append(_Away(views, size, data.device))
            found.append(data)
            for at in places:
                self._tensors[at] = None
        self._recount()
        return found

    def attach(self, storages: Sequence[Tensor]) -> None:
        """Take back what ``detach`` gave: the same bytes, in the same order, wherever they lie.

        Raises:
            SplitError: other storages than it gave; or something was written in place since the
                hand-over.
        """
        self._check_unwritten()
        if len(storages) != len(self.away) or not all(map(_fits, self.away, storages)):
            expected = [f"{each.bytes} bytes on {each.device}" for each in self.away]
            given = [_described(each) for each in storages]
            raise SplitError(
                f"expected the storages that were detached, {', '.join(expected) or 'none'}, as "
                f"torch.uint8, each filling its own; got {', '.join(given) or 'none'}"
            )
        for away, data in zip(self.away, storages, strict=True):
            for at, view in away.views:
                self._tensors[at] = view.over(data)
        self.away = []
        self._recount()

    def _count(self) -> tuple[int, ...]:
        exposed = map(self._tensors.__getitem__, self._known.exposed)
        return versions(chain(exposed, self._watched))

    def _recount(self) -> None:
        """Other tensors lie at some places, and nothing was written until now."""
        self._storages, count = None, len(self._known.exposed)
        self._counts = self._count()[:count] + self._counts[count:]

    def again(self) -> Residuals:
        """A second set of the same residuals, for a backward that runs twice
        (``retain_graph=True``).
        """
        self._check_unwritten()
        twin = copy.copy(self)
        twin._tensors = self._apart(self._tensors)
        twin._recount()
        return twin

    def _apart(self, tensors: Iterable[Any]) -> list[Any]:
        """The tensors, copied where the next graph may write over them."""
        found = list(tensors)
        for at in self._known.donated if found else ():
            if isinstance(found[at], Tensor):  # some kernels return None
                found[at] = TensorSpec.of(found[at]).copy(found[at])
        return found

    def take(self) -> list[Any]:
        """The tensors, numbers and state, in one list; this object keeps none of them.

        Raises:
            SplitError: something was written in place since the hand-over, or a parameter or
                constant has other data; names it.
        """
        watched, (places, dtypes) = self._watched, self._places
        exposed = map(self._tensors.__getitem__, self._known.exposed)
        if versions(chain(exposed, watched)) != self._counts:
            self._check_unwritten()
        if tuple(map(_POINTER, watched)) != places or tuple(map(_DTYPE, watched)) != dtypes:
            self._check_unmoved()
        tensors, self._tensors = self._tensors, []
        self._storages = None
        if self._stream is not None:
            follow(self._stream, tensors)
        tensors += self.state
        self.state = self._watched = ()
        return tensors

    def _check_unwritten(self) -> None:
        now = self._count()
        if now == self._counts:
            return
        known = self._known
        pairs = zip(known.watched(len(self._tensors)), self._counts, now, strict=True)
        written = ", ".join(name for name, then, count in pairs if then != count)
        raise SplitError(
            f"written in place between {known.when}: {written}. {known.first} before writing, or "
            "write into a clone."
        )

    def _check_unmoved(self) -> None:
        known = self._known
        names = known.watched(len(self._tensors))[len(known.exposed) :]
        moved = ", ".join(
            name
            for name, tensor, place, dtype in zip(names, self._watched, *self._places, strict=True)
            if dtype is not tensor.dtype
            or (place != tensor.data_ptr() and not allows_other_memory(tensor))
        )
        if moved:
            raise SplitError(
                f"moved, converted or given other data between {known.when}: {moved}. "
                f"{known.first} before that."
            )


def is_shared(value: Any) -> bool:
    """Whether NumPy, DLPack or another process can write into the tensor's memory."""
    return isinstance(value, Tensor) and not value.untyped_storage().resizable()


def own(values: Sequence[Any], places: Collection[int]) -> list[Any]:
    """The values, with copies of the tensors at these places, as they lie in memory; those over
    the same memory share one copy.
    """
    found = list(values)
    if len(places) == 1:
        (at,) = places
        if isinstance(found[at], Tensor) and found[at].is_contiguous():
            found[at] = found[at].clone()
            return found
    copies: dict[tuple[int, int, torch.dtype], Tensor] = {}
    for at in places:
        tensor = found[at]
        if not isinstance(tensor, Tensor) or not tensor.numel():
            continue
        size, stride = tensor.shape, tensor.stride()
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        key = (tensor.data_ptr(), span, tensor.dtype)
        if key not in copies:
            copies[key] = tensor.as_strided((span,), (1,)).clone()
        found[at] = copies[key].as_strided(size, stride, 0)
    return found
