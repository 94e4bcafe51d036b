"""The process group and its works, as torch.distributed sees them, and their installation.

The data go over Gloo, one group of its own for each communicator, so that sums have Gloo's bits.

A work's ``wait`` holds the host, where NCCL has the current stream wait: tensors of the CPU have no
streams, and are read right after it. What was given to other queues behind a wait starts later than
it in both. But under NCCL the host goes on, and may make the next communicator, before that; so
here more is refused than there.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from . import VARIABLE, Settings, chosen
from .link import Link, Pending, StrictError
from .rules import RECEIVE, SEND, pair_of

NAME = "strict"
_NO_TIME = timedelta(0)
_links: dict[str, Link] = {}  # that of this process's default group


class StrictWork(dist.Work):
    """The handle of one operation or of several coalesced ones."""

    def __init__(self, link: Link, operations: Sequence[Call], timeout: float) -> None:
        super().__init__()
        self._link, self._operations, self._timeout = link, operations, timeout

    def wait(self, timeout: timedelta = _NO_TIME) -> bool:
        """Hold the host until all are over."""
        seconds = timeout.total_seconds()
        for operation in self._operations:
            self._link.wait(
                operation.pending, operation.name, seconds if seconds > 0 else self._timeout
            )
        return True

    def each(self) -> list[StrictWork]:
        """A work for each of its operations."""
        return [
            StrictWork(self._link, [operation], self._timeout) for operation in self._operations
        ]

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all are over, well or not."""
        return all(operation.pending.over for operation in self._operations)

    def is_success(self) -> bool:
        """Whether all are over and none came to nothing."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """The first error."""
        return next((e.pending.error for e in self._operations if e.pending.error), None)

    def result(self) -> list[Tensor]:
        """The output tensors of the operations."""
        return [tensor for operation in self._operations for tensor in operation.tensors]

    def get_future(self) -> Future[Any]:
        """Is done when all are over."""
        future: Future[Any] = Future()
        left = [len(self._operations)]

        def over() -> None:
            left[0] -= 1
            if left[0] == 0:
                error = self.exception()
                future.set_exception(error) if error else future.set_result(self.result())

        for operation in self._operations:
            operation.pending.then(over)
        return future


class Call:
    """One call of a group, not yet in its queue."""

    def __init__(
        self,
        kind: str,
        peers: Sequence[int],
        size: object,
        tensors: Sequence[Tensor],
        run: Callable[[dist.ProcessGroup], dist.Work | None],
    ) -> None:
        self.kind, self.peers, self.size, self.tensors = kind, peers, size, tensors
        self.move = run
        self.pending = Pending(lambda: None)

    @property
    def name(self) -> str:
        if self.kind in (SEND, RECEIVE):
            return f"{self.kind} {'to' if self.kind == SEND else 'from'} rank {self.peers[0]}"
        return f"{self.kind} of ranks {', '.join(map(str, self.peers))}"


class StrictGroup(dist.ProcessGroup):
    """One rank's end of a group.

    Args:
        link: of this process.
        store: of the group.
        rank: in the group.
        ranks: its members, as the default group numbers them.
        name: of the group, the same on all.
        timeout: of waits.
        eager: see ``Settings``.
        default: whether it is the one of all ranks, with which the link ends.
    """

    def __init__(
        self,
        link: Link,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta,
        *,
        eager: bool,
        default: bool,
    ) -> None:
        super().__init__(rank, len(ranks))  # torch takes no store of a class of Python
        self._link, self._ranks, self._name = link, tuple(ranks), name
        self._store, self._timeout, self._eager = store, timeout, eager
        self._default = default
        self._made: dict[str, dist.ProcessGroup] = {}
        self._coalesced: list[Call] | None = None
        self._ended = False
        if eager:
            self._communicator(name, self._ranks)

    def beside(
        self, name: str, ranks: Sequence[int], timeout: timedelta, *, eager: bool
    ) -> StrictGroup:
        """Another group of some ranks, of which torch does not know."""
        local = list(ranks).index(self._ranks[self.rank()])
        store = dist.PrefixStore(f"beside {name}", self._store)
        link = self._link
        return StrictGroup(link, store, local, ranks, name, timeout, eager=eager, default=False)

    @property
    def members(self) -> tuple[int, ...]:
        """Its ranks, as the default group numbers them."""
        return self._ranks

    def number_of(self, rank: int) -> int:
        """In this group, of a rank as the default group numbers it."""
        return self._ranks.index(rank)

    # --- communicators --------------------------------------------------------------------------

    def _communicator(self, name: str, members: Sequence[int]) -> None:
        """Make it, with all its members, unless it is there."""
        if name in self._made:
            return
        self._link.make(name, members, self._timeout.total_seconds())
        store = dist.PrefixStore(f"{name}/", self._store)
        rank = list(members).index(self._link.rank)
        gloo = dist.ProcessGroupGloo(store, rank, len(members), timeout=self._timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._made[name] = under = dist.ProcessGroup(store, rank, len(members))
        under._register_backend(torch.device("cpu"), kind, gloo)
        under._set_default_backend(kind)

    def start(self, operation: Call) -> StrictWork | None:
        """Enqueue it, or put it with those that are being coalesced."""
        if self._ended:
            raise StrictError(f"communicator was aborted on this rank: {self._name!r}")
        if self._coalesced is not None:
            self._coalesced.append(operation)
            return None
        single = operation.kind in (SEND, RECEIVE) and not self._eager
        if single:
            pair = tuple(sorted({self._link.rank, *operation.peers}))
            name = pair_of(self._name, pair)
            return self._enqueue(name, pair, [operation])
        return self._enqueue(self._name, self._ranks, [operation])

    def _enqueue(self, name: str, members: Sequence[int], operations: Sequence[Call]) -> StrictWork:
        self._communicator(name, members)
        under = self._made[name]
        for operation in operations:
            operation.pending.run = functools.partial(_moved, operation, under, members)
        parts = [(item.pending, item.kind, item.peers, item.size) for item in operations]
        self._link.enqueue(name, parts)
        return StrictWork(self._link, operations, self._timeout.total_seconds())

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> StrictWork:
        operations, self._coalesced = self._coalesced or [], None
        if not operations:
            return StrictWork(self._link, [], 0.0)
        return self._enqueue(self._name, self._ranks, operations)

    # --- messages -------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int) -> StrictWork | None:
        return self._message(SEND, tensors, to)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> StrictWork | None:
        return self._message(RECEIVE, tensors, source)

    def _message(self, kind: str, tensors: list[Tensor], other: int) -> StrictWork | None:
        peer = self._ranks[other]
        (tensor,) = tensors

        def run(under: dist.ProcessGroup, members: Sequence[int]) -> dist.Work | None:
            if peer == self._link.rank:
                return None  # copied by its receive
            call = under.send if kind == SEND else under.recv
            return call([tensor], list(members).index(peer), 0)

        return self.start(Call(kind, (peer,), tensor.nbytes, tensors, run))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> StrictWork:
        raise StrictError("NCCL receives from a rank that is named")

    # --- collectives ----------------------------------------------------------------------------

    def _collective(self, kind: str, *args: Any, **options: Any) -> StrictWork | None:
        def run(under: dist.ProcessGroup, members: Sequence[int]) -> dist.Work | None:
            return getattr(under, kind)(*args, **options)

        tensors = [item for item in _flat(args) if isinstance(item, Tensor)]
        sized = tensors if kind in _ALIKE else []
        size = [item.nbytes for item in sized]
        return self.start(Call(kind, self._ranks, size, tensors, run))

    # --- the rest -------------------------------------------------------------------------------

    def abort(self) -> None:
        """End what is under way here; members that wait for it are told so."""
        self._end(f"it has aborted group {self._name!r}")

    def shutdown(self) -> None:
        """End it; the default group's is the end of all."""
        self._end(f"it has destroyed group {self._name!r}")
        if self._default:
            self._link.close()

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            self._link.abort(self._name, why)
            self._made.clear()  # Gloo's threads end with what is under way

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return NAME

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        """A stand-in for the backend, with the attributes that torch reads."""
        options = SimpleNamespace(_timeout=self._timeout, backend=NAME)
        return SimpleNamespace(options=options, supports_coalescing=True, supports_splitting=False)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        pass


_ALIKE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
"""Whose tensors have one size on all members."""

_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter",
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single",
)  # fmt: skip
for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(StrictGroup, _name, functools.partialmethod(StrictGroup._collective, _name))


def _flat(values: Any) -> list[Any]:
    if isinstance(values, list | tuple):
        return [leaf for value in values for leaf in _flat(value)]
    return [values]


def _moved(operation: Call, under: dist.ProcessGroup, members: Sequence[int]) -> None:
    """Move the data of an operation that may run."""
    work = operation.move(under, members)
    if work is not None:
        work.wait()


def _create(options: Any, backend_options: Any) -> StrictGroup:
    """As torch asks for it."""
    rank, size = options.group_rank, options.group_size
    settings = chosen() or Settings()
    ranks = list(options.global_ranks_in_group)
    if default := not ranks:
        _links[NAME] = Link(options.store, rank, size, settings)
    return StrictGroup(
        _links[NAME],
        options.store,
        rank,
        ranks or [*range(size)],
        str(options.group_id),
        options.timeout,
        eager=settings.eager,
        default=default,
    )


def register() -> None:
    """Make it known to torch, which coalesces for groups of its own class only."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    usual = c10d.batch_isend_irecv

    @functools.wraps(usual)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = p2p_op_list[0].group or dist.group.WORLD
        if not isinstance(group, StrictGroup):
            return usual(p2p_op_list)
        with c10d._coalescing_manager(group, p2p_op_list[0].tensor.device, True) as manager:
            for item in p2p_op_list:
                peer = "group_dst" if item.op is dist.isend else "group_src"
                item.op(item.tensor, group=item.group, tag=item.tag, **{peer: item.group_peer})
        return manager.works

    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


def use() -> None:
    """Have it stand for Gloo, wherever a process group of that is asked for."""
    register()

    def in_place(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **options: Any) -> Any:
            if options.get("backend") == "gloo":
                options["backend"] = NAME
            return make(*(NAME if argument == "gloo" else argument for argument in args), **options)

        return made

    for name in _MAKERS:
        if not hasattr(getattr(dist, name), _MARK):
            built = in_place(getattr(dist, name))
            setattr(built, _MARK, getattr(dist, name))
            setattr(dist, name, built)


def stop_using() -> None:
    """Gloo is Gloo again."""
    for name in _MAKERS:
        setattr(dist, name, getattr(getattr(dist, name), _MARK, getattr(dist, name)))


_MAKERS = ("init_process_group", "new_group")
_MARK = "_in_place_of"


@contextlib.contextmanager
def over(text: str) -> Iterator[None]:
    """Another default process group in place of the one that there is, of the same ranks; where it
    is strict, it stands for Gloo meanwhile. It stays until the next one.

    Args:
        text: see ``Settings``.
    """
    store, rank, size = _place()
    earlier = os.environ.get(VARIABLE, "gloo")
    os.environ[VARIABLE] = text
    (use if chosen() else stop_using)()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        yield
    finally:
        os.environ[VARIABLE] = earlier
        (use if chosen() else stop_using)()


def _place() -> tuple[Any, int, int]:
    """End the default process group; return store, rank and size for the next."""
    world = dist.group.WORLD
    assert world is not None
    rank, size, store = world.rank(), world.size(), world.get_group_store()
    dist.destroy_process_group()
    return dist.PrefixStore("next", store), rank, size  # within that of the one before


_TIMEOUT = timedelta(seconds=60)
