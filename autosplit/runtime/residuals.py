"""``Residuals``: tensors that one graph leaves for the next, with a check that nothing writes into
them in between.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from autosplit.device import follow, stream_under
from autosplit.errors import SplitError
from autosplit.passes.analysis.aliasing import spanned_elements
from autosplit.torch_internals.state import (
    UNCOUNTED,
    VERSION,
    allows_other_memory,
    any_referenced,
    versions,
)

from .boundary_layout import BoundaryLayout
from .storages import (
    DetachedStorage,
    PlacedStorage,
    StorageKey,
    StorageView,
    detachable,
    is_plain,
    storage_of,
    storage_text,
    whole_storage,
)
from .tensor_spec import TensorSpec

State = Mapping[str, Tensor]

_NUMBERS = (int, float, bool)
_POINTER, _DTYPE = Tensor.data_ptr, attrgetter("dtype")


class StateRecord:
    """The parameters and buffers that the next graph reads, as they were at a boundary.

    Microbatches between which the module is unchanged share a record.

    Args:
        layout: static facts about the boundary.
        state: parameters and buffers that the next graph reads.

    Attributes:
        state: as passed.
        protected: the tensors of ``state`` that no backward graph writes, then constants.
        versions: the version counters of ``protected``.
        addresses: the addresses of ``protected``.
        dtypes: the dtypes of ``protected``.
        parts: what W reads of ``state``, by the boundary between I and W.
    """

    __slots__ = ("addresses", "dtypes", "parts", "protected", "state", "versions")

    def __init__(self, layout: BoundaryLayout, state: tuple[Tensor, ...]) -> None:
        constants = layout.constants.tensors
        protected = layout.protected(state) if layout.live else state
        self.state = state
        self.protected = protected = protected + constants if constants else protected
        try:  # written out, as below
            self.versions = tuple(map(VERSION, protected))
        except UNCOUNTED:
            self.versions = versions(protected)
        self.addresses, self.dtypes = tuple(map(_POINTER, protected)), tuple(map(_DTYPE, protected))
        self.parts: dict[BoundaryLayout, StateRecord] = {}


_NO_STATE = StateRecord(BoundaryLayout(()), ())


class Residuals:
    """The values that one graph leaves for the next, for one microbatch.

    Ownership, from F to I to W::

                          F ──── saved ────► I ──── deferred ────► W
                                 (or B)
        saved tensors     │ Residuals of F   │
        deferred tensors  │                  │ Residuals of I      │
        state, constants  │ the module owns them; both Residuals refer to them

        A saved tensor that I only passes on moves from the Residuals of F to those of I.

    Contract:
        - ``take_arguments`` hands all values over, once. The graph that receives them frees each at
          its last use; this object keeps none.
        - Between the two graphs, no value may be written. ``take_arguments`` compares version
          counters, and for state and constants also the address and dtype: ``.to()`` and
          ``parameter.data = ...`` replace a tensor's data without counting as a write.
        - Tensors that never left a graph cannot have been written, and are not checked.
        - Storages may be detached in between, as bytes (``detach``, ``attach``). Until all are
          attached again, the values are incomplete and must not be taken.

    Terms:
        residual: a tensor, or a number read from data, that the next graph receives.
        exposed tensor: a residual in memory that code outside of the graphs can reach.
        state: the parameters and buffers that the next graph reads.

    Shapes:
        Each residual has the shape, dtype and strides that the graphs were traced with for these
        sizes; detached storages are one-dimensional ``torch.uint8``.

    Raises:
        SplitError: from ``take_arguments``, ``detach``, ``attach``, ``duplicate`` and
            ``copy_reachable``, if a value was written or replaced since the first of the two graphs
            ran; names it.

    Attributes:
        record: the parameters and buffers that the next graph reads, as they were at the boundary.
        live: the tensors of ``record.state`` that the next graph or a later graph writes.
        detached: the storages that are detached now.
    """

    __slots__ = (
        "_counts",
        "_layout",
        "_storages",
        "_stream",
        "_tensors",
        "_written_by_users",
        "detached",
        "live",
        "record",
    )

    def __init__(self, layout: BoundaryLayout, tensors: list[Any], record: StateRecord) -> None:
        """Record the versions of exposed tensors, to compare with.

        Args:
            layout: static facts about the boundary.
            tensors: the residuals, in the order of ``layout.names``.
            record: parameters and buffers that the next graph reads.
        """
        self._layout, self._tensors, self.record = layout, tensors, record
        try:  # written out, because every graph runs it, and nearly always all tensors are counted
            self._counts = tuple(map(VERSION, map(tensors.__getitem__, layout.exposed)))
        except UNCOUNTED:
            self._counts = self._count()
        self.live: tuple[Tensor, ...] = ()
        self._written_by_users: tuple[int, ...] = ()
        if layout.live:
            self.live = tuple([record.state[at] for at in layout.live])
            self._written_by_users = users_writes(self.live)
        self._stream = stream_under(tensors) if layout.on_streams else None
        self.detached: list[DetachedStorage] = []
        self._storages: Mapping[StorageKey, PlacedStorage] | None = None

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The residuals that are tensors, without the numbers. The entry of a tensor that a kernel
        did not return is None.
        """
        return [value for value in self._tensors if not isinstance(value, _NUMBERS)]

    @property
    def named_tensors(self) -> dict[str, Tensor]:
        """The residuals by name, without the numbers."""
        pairs = zip(self._layout.names, self._tensors, strict=False)  # the state follows
        return {name: value for name, value in pairs if isinstance(value, Tensor)}

    @property
    def fixed(self) -> tuple[Tensor, ...]:
        """State and constants that the next graph or a later graph reads."""
        return (*self.record.state, *self._layout.constants.tensors)

    def drop_tensors(self) -> None:
        """Drop the tensors, because autograd keeps them, packed by the user's saved-tensor hooks.
        Their specs take their places.
        """
        self._storages = None
        self._tensors = [v if isinstance(v, _NUMBERS) else _spec(v) for v in self._tensors]

    def restore_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Restore the tensors as the user's hooks unpacked them, with the strides that they had."""
        unpacked = iter(tensors)
        values = [
            v if isinstance(v, _NUMBERS) else _conform(next(unpacked), v) for v in self._tensors
        ]
        self._tensors = self._without_donation(values)  # the hooks may keep what they returned
        self._recount()

    def is_shared(self, place: int) -> bool:
        """Whether code outside of torch (NumPy, another process) can write into the tensor at this
        position.
        """
        return is_shared(self._tensors[place])

    def copy_at(self, places: Collection[int]) -> None:
        """Copy the tensors at these positions, whose memory the caller may write into."""
        if not places:
            return
        self._tensors = copied_at(self._tensors, places)
        self._recount()

    def copy_reachable(self, places: Iterable[int]) -> None:
        """Copy the tensors at these positions to which objects outside of this one refer.

        The owner of such an object may write into the tensor through NumPy, DLPack or ``.data``,
        which no version counter counts.

        Raises:
            SplitError: a tensor was written in place since the boundary.
        """
        tensors = self._tensors
        present = [at for at in places if tensors and isinstance(tensors[at], Tensor)]
        reachable = [at for at in present if any_referenced(map(tensors.__getitem__, (at,)))]
        if reachable:
            self._check_unwritten()
            self.copy_at(reachable)

    def storages(self) -> Mapping[StorageKey, PlacedStorage]:
        """Storages that can be detached from the residual tensors. Cached, because it is read for
        every microbatch.
        """
        if self._storages is None:
            self._storages = detachable(self._tensors)
        return self._storages

    def batch_storages(self) -> set[StorageKey]:
        """Keys of the storages of which an exposed tensor is only a part, as a microbatch is a part
        of its batch. The caller holds the rest.
        """
        exposed = map(self._tensors.__getitem__, self._layout.exposed)
        tensors = filter(is_plain, exposed)
        return {storage_of(t) for t in tensors if t.nbytes != t.untyped_storage().nbytes()}

    def storage_bytes(self, place: int) -> Tensor:
        """The whole storage of the tensor at a position, as bytes."""
        return whole_storage(self._tensors[place])

    def detach(self, storages: Iterable[PlacedStorage]) -> list[Tensor]:
        """Detach some of ``storages()`` and return each as a tensor of bytes: ``torch.uint8``
        [bytes].

        Raises:
            SplitError: something was written in place since the boundary.
        """
        self._check_unwritten()
        removed = []
        for places, size in storages:
            data = whole_storage(self._tensors[places[0]])
            views = [(at, StorageView.of(self._tensors[at])) for at in places]
            self.detached.append(DetachedStorage(views, size, data.device))
            removed.append(data)
            for at in places:
                self._tensors[at] = None
        self._recount()
        return removed

    def attach(self, storages: Sequence[Tensor]) -> None:
        """Attach the storages that ``detach`` returned: the same bytes in the same order; their
        addresses may differ.

        Raises:
            SplitError: other storages were passed, or something was written in place since the
                boundary.
        """
        self._check_unwritten()
        if len(storages) != len(self.detached) or not all(
            map(DetachedStorage.is_replaced_by, self.detached, storages)
        ):
            expected = [f"{gap.bytes} bytes on {gap.device}" for gap in self.detached]
            received = [storage_text(data) for data in storages]
            raise SplitError(
                "expected the storages that were detached, or copies of them as torch.uint8: "
                f"{', '.join(expected) or 'none'}; got {', '.join(received) or 'none'}. Pass the "
                "list "
                "that detach_held() returned to attach_held()"
            )
        for gap, data in zip(self.detached, storages, strict=True):
            for at, view in gap.views:
                self._tensors[at] = view.over(data)
        self.detached = []
        self._recount()

    def _count(self) -> tuple[int, ...]:
        """The version counters of exposed tensors."""
        return versions([*map(self._tensors.__getitem__, self._layout.exposed)])

    def _recount(self) -> None:
        """Record version counters again. Called after tensors were replaced, which does not count
        as a write.
        """
        self._storages, self._counts = None, self._count()

    def duplicate(self) -> Residuals:
        """Return a second set of these residuals, for a second backward (``retain_graph=True``)."""
        self._check_unwritten()
        twin = copy.copy(self)
        twin._tensors = self._without_donation(self._tensors)
        twin._recount()
        return twin

    def _without_donation(self, tensors: Iterable[Any]) -> list[Any]:
        """The tensors, with copies in place of tensors that the next graph may overwrite."""
        values = list(tensors)
        for at in self._layout.donated if values else ():
            if isinstance(values[at], Tensor):  # some kernels return None
                values[at] = TensorSpec.of(values[at]).copy(values[at])
        return values

    def take_arguments(self) -> list[Any]:
        """Return the tensors, numbers and state in one list, and keep none of them.

        Raises:
            SplitError: something was written in place since the boundary, or the data of a
                parameter, buffer or constant were replaced; names it.
        """
        if self._layout.live and self._layout.before_weight:
            self._check_sums()
        record, protected = self.record, self.record.protected
        try:
            exposed = map(self._tensors.__getitem__, self._layout.exposed)
            counts = tuple(map(VERSION, chain(exposed, protected)))
        except UNCOUNTED:
            counts = self._count() + versions(protected)
        if counts != self._counts + record.versions:
            self._check_unwritten()
        is_moved = tuple(map(_POINTER, protected)) != record.addresses
        if is_moved or tuple(map(_DTYPE, protected)) != record.dtypes:
            self._check_unmoved()
        tensors, self._tensors = self._tensors, []
        self._storages = None
        if self._stream is not None:
            follow(self._stream, tensors)
        tensors += record.state
        self.record = _NO_STATE
        return tensors

    def _check_unwritten(self) -> None:
        """Raise ``SplitError`` if a version counter has moved since the boundary."""
        record, now = self.record, self._count() + versions(self.record.protected)
        earlier = self._counts + record.versions
        if now == earlier:
            return
        layout = self._layout
        pairs = zip(layout.protected_names(len(self._tensors)), earlier, now, strict=True)
        written = [name for name, then, count in pairs if then != count]
        advice = dict.fromkeys(layout.advice[name] for name in written if name in layout.advice)
        text = (
            f"tensors were written in place between {layout.interval}: {', '.join(written)}. "
            f"{layout.remedy} before writing, or write into a clone."
        )
        raise SplitError(" ".join([text, *advice]))

    def _check_sums(self) -> None:
        """Raise ``SplitError`` if code outside of the graphs has written into a tensor to which W
        adds.
        """
        pairs = zip(self._written_by_users, users_writes(self.live), strict=True)
        if not all(then == now for then, now in pairs):
            names = self._layout.names[len(self._tensors) :]
            sums = ", ".join(names[at] for at in self._layout.live)
            raise SplitError(
                "a tensor to which backward_weight() adds was written in place after backward(): "
                f"one of {sums}. Call backward_weight() before you read, clear or write it"
            )

    def _check_unmoved(self) -> None:
        """Raise ``SplitError`` if state or a constant has another address or dtype than at the
        boundary.
        """
        layout, record = self._layout, self.record
        names = layout.protected_names(len(self._tensors))[len(layout.exposed) :]
        moved = ", ".join(
            name
            for name, tensor, address, dtype in zip(
                names, record.protected, record.addresses, record.dtypes, strict=True
            )
            if dtype is not tensor.dtype
            or (address != tensor.data_ptr() and not allows_other_memory(tensor))
        )
        if moved:
            raise SplitError(
                f"tensors were moved, converted or replaced between {layout.interval}: {moved}. "
                f"{layout.remedy} before you change them."
            )


_OWN_WRITES = "_autosplit_writes"


def users_writes(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """For each tensor, the number of writes so far, without writes of graphs."""
    return tuple([tensor._version - vars(tensor).get(_OWN_WRITES, 0) for tensor in tensors])


@contextlib.contextmanager
def own_writes(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context in which writes into these tensors count as writes of graphs, not of the user."""
    versions_before = [tensor._version for tensor in tensors]
    yield
    for tensor, version in zip(tensors, versions_before, strict=True):
        vars(tensor)[_OWN_WRITES] = vars(tensor).get(_OWN_WRITES, 0) + tensor._version - version


def is_shared(value: Any) -> bool:
    """Whether NumPy, DLPack or another process can write into the tensor's memory."""
    return isinstance(value, Tensor) and not value.untyped_storage().resizable()


def _spec(value: Tensor | None) -> TensorSpec | None:
    return None if value is None or value.layout is not torch.strided else TensorSpec.of(value)


def _conform(value: Any, spec: TensorSpec | None) -> Any:
    return value if spec is None else spec.conform(value)


def copied_at(values: Sequence[Any], places: Collection[int]) -> list[Any]:
    """The values, with copies of the tensors at these positions. Copies keep strides, and tensors
    over the same memory share one copy.
    """
    copied = list(values)
    if len(places) == 1:
        (at,) = places
        if isinstance(copied[at], Tensor) and copied[at].is_contiguous():
            copied[at] = copied[at].clone()
            return copied
    copies: dict[tuple[int, int, torch.dtype], Tensor] = {}
    for at in places:
        tensor = copied[at]
        if not isinstance(tensor, Tensor) or not tensor.numel():
            continue
        size, stride = tensor.shape, tensor.stride()
        length = spanned_elements(size, stride)
        key = (tensor.data_ptr(), length, tensor.dtype)
        if key not in copies:
            copies[key] = tensor.as_strided((length,), (1,)).clone()
        copied[at] = copies[key].as_strided(size, stride, 0)
    return copied
