"""How long actions, messages and copies to the host take, in seconds of ``perf_counter``."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.simulation.timeline import Span
from autosplit.pipeline.simulation.transfer import Transfer

from .groups import Groups
from .host_store import HostStore

T = TypeVar("T")


class Recorder(Protocol):
    """Records one step at a time."""

    def begin(self) -> None:
        """Start a step."""
        ...

    def run(self, action: Action, compute: Callable[[], T]) -> T:
        """Compute, and note when that was."""
        ...

    def note(self, spans: Iterable[Span]) -> None:
        """Add what ran beside computation."""
        ...

    def spans(self) -> list[Span]:
        """What the step ran, in the order in which it began; the device must be done with it."""
        ...


class HostRecorder:
    """For stages whose calls return when the work is done."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._noted: list[tuple[Action, Any, Any]] = []
        self._beside: list[Span] = []

    def begin(self) -> None:
        self._noted, self._beside = [], []

    def run(self, action: Action, compute: Callable[[], T]) -> T:
        start = self._mark()
        result = compute()
        self._noted.append((action, start, self._mark()))
        return result

    def note(self, spans: Iterable[Span]) -> None:
        self._beside += spans

    def spans(self) -> list[Span]:
        computed = [
            Span(self._rank, action, self._seconds(start), self._seconds(end))
            for action, start, end in self._noted
        ]
        return sorted([*computed, *self._beside], key=lambda span: span.start)

    def _mark(self) -> Any:
        return perf_counter()

    def _seconds(self, mark: Any) -> float:
        return float(mark)


class DeviceRecorder(HostRecorder):
    """For stages whose calls only enqueue kernels on a GPU: by events between them.

    In a step nobody may wait for the whole device, for a receive that was posted ahead stands
    there until another rank has what this one has yet to send. And a wait at every action would
    measure the gaps that it makes.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(rank)
        self._device = device

    def begin(self) -> None:
        super().begin()
        self._origin = self._mark()
        self._origin.synchronize()
        self._started = perf_counter()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, mark: torch.cuda.Event) -> float:
        milliseconds: float = self._origin.elapsed_time(mark)
        return self._started + milliseconds / 1000.0


def recorder_on(rank: int, device: torch.device) -> Recorder:
    """The recorder of a rank whose stages are on ``device``."""
    return DeviceRecorder(rank, device) if device.type == "cuda" else HostRecorder(rank)


Pair = tuple[int, int]

_LARGE = 2**23  # bytes
_ROUNDS = 20
_WARMUP = 3
_SUMS = 5


def ring(ranks: int) -> set[Pair]:
    """Each rank and the next, the last and the first; the lower one first."""
    steps = ((rank, (rank + 1) % ranks) for rank in range(ranks))
    return {(min(step), max(step)) for step in steps if ranks > 1}


def measure_transfer(groups: Groups, device: torch.device, pairs: Collection[Pair]) -> Transfer:
    """The links between these pairs of ranks, with the messages that a trainer's stages send.

    Pairs that have no rank in common are measured at once. Collective, between steps; all ranks
    get the same.

    Args:
        groups: of all ranks.
        device: where the messages live.
        pairs: of ranks, the lower one first, the same on every rank; without any, nothing is
            measured and nothing takes time.

    Returns:
        A link for each pair, the slowest latency and bandwidth for all others, no
        ``message_bytes``.

    Raises:
        LostPeerError: some rank did not take part.
    """
    if not pairs:
        return Transfer()
    groups.connect(pairs)
    links: dict[Pair, Link] = {}
    for at_once in _apart(pairs):
        mine = {pair: _between(groups, device, pair) for pair in at_once if groups.rank in pair}
        for found in groups.everybody.gather(mine):
            links = found | links  # of a pair's two ranks the lower one says, of replicas the first
    latency = max(link.latency for link in links.values())
    bandwidth = min(link.bandwidth for link in links.values())
    return Transfer(latency, bandwidth, pairs=links)


def measure_sum(groups: Groups, device: torch.device, link: dist.ProcessGroup) -> Link:
    """How long the ranks of a group take to sum up tensors: the slowest of all such groups.

    Collective over all ranks, each of which is in one of the groups; all get the same.

    Raises:
        LostPeerError: some rank did not take part.
    """

    def seconds(size: int) -> float:
        tensor = torch.zeros(-(-size // 4), device=device)

        def reduce() -> None:
            with groups.losing("the replicas"):
                dist.all_reduce(tensor, group=link)

        return _least(reduce, _SUMS, device)

    heard: list[Link] = groups.everybody.gather(_link_of(seconds))
    return Link(max(each.latency for each in heard), min(each.bandwidth for each in heard))


def _apart(pairs: Collection[Pair]) -> list[list[Pair]]:
    """The pairs in few groups, in none of which two have a rank in common."""
    found: list[list[Pair]] = []
    for pair in sorted(pairs):
        for group in found:
            if not any({*pair} & {*other} for other in group):
                group.append(pair)
                break
        else:
            found.append([pair])
    return found


def _between(groups: Groups, device: torch.device, pair: Pair) -> Link:
    """By half of the quickest way there and back."""
    (peer,) = {*pair} - {groups.rank}

    def seconds(size: int) -> float:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)

        def there_and_back() -> None:
            for sender in pair:
                work = (groups.isend if groups.rank == sender else groups.irecv)(tensor, peer)
                if work is not None:
                    with groups.losing(groups.named(peer)):
                        work.wait()

        return _least(there_and_back, _ROUNDS, device) / 2.0

    return _link_of(seconds)


def _link_of(seconds: Callable[[int], float]) -> Link:
    """By the seconds that 1 byte and many take."""
    small, large = seconds(1), seconds(_LARGE)
    return Link(small, _LARGE / max(large - small, 1e-9))


def _least(call: Callable[[], None], rounds: int, device: torch.device) -> float:
    seconds = []
    for _ in range(_WARMUP + rounds):
        start = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
    return min(seconds[_WARMUP:])


_SECONDS = 0.012  # of each kind of work, alone or beside the other
_REPEATS = 3
_PIECES = 32  # at most
_SWEPT = 2**25  # bytes, of which no core has a cache
_WIDTH = 160  # of the matrices that are multiplied, which fit into a core's own cache
_MOST = 2**20  # bytes that are copied at once
_SLOWEST = 2.0  # what is more comes of something else that ran meanwhile


def measure_slowing(store: HostStore, piece: int) -> float:
    """Seconds by which computing takes longer, for each second that a copy takes by itself.

    About 0 where a core is idle, and 1 where copies and computation share theirs. Ranks of one host
    share its cores, too, so that all have to measure at once.

    Args:
        store: one on the CPU.
        piece: bytes of a storage.
    """
    found = []
    for _ in range(_REPEATS):
        products = _products()
        with _Copies(store, min(piece, _MOST)) as copies:
            alone, _ = copies.in_a_second(lambda: time.sleep(_SECONDS))
            copied, beside = copies.in_a_second(_products)
        lost, taken = 1.0 - beside / products, copied / max(alone, 1e-9)
        found.append(lost / taken if taken else 0.0)
    return min(max(0.0, statistics.median(found)), _SLOWEST)


def _products() -> float:
    """How many matrix products this thread makes in a second."""
    one, other = torch.ones(2, _WIDTH, _WIDTH, device="cpu")
    start, made = perf_counter(), 0
    while (now := perf_counter()) - start < _SECONDS:
        torch.mm(one, other)
        made += 1
    return made / (now - start)


class _Copies:
    """A thread that puts and takes one piece after another, inside the context."""

    def __init__(self, store: HostStore, piece: int) -> None:
        self._store = store
        self._data = torch.ones(piece, dtype=torch.uint8, device="cpu")
        self._made = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autosplit-copies")

    def __enter__(self) -> _Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def in_a_second(self, meanwhile: Callable[[], T]) -> tuple[float, T]:
        """How many pieces it copies in a second during that, and what that gives."""
        start, made = perf_counter(), self._made
        found = meanwhile()
        return (self._made - made) / (perf_counter() - start), found

    def _run(self) -> None:
        while not self._ends.is_set():
            ticket = self._store.put(self._data)
            self._store.take(ticket, torch.empty_like(self._data))
            self._made += 1


def measure_store(store: HostStore, piece: int = _LARGE) -> Link:
    """How long it takes to put and to take, the slower of the two. As in a step, what is copied has
    left the core's own cache by then: hot, it would be copied in half the time.

    Args:
        store: which.
        piece: bytes of a storage, of which several go out before they come back, as in a step. Of
            small ones the bandwidth is less, for each is a call of its own.
    """
    small = torch.zeros(1, dtype=torch.uint8, device=store.device)
    latency = min(_out_and_back(store, [small]) for _ in range(_REPEATS))
    piece = min(max(piece, 1), _LARGE)
    count = min(_LARGE // piece, _PIECES)
    seconds = []
    sweeping = torch.zeros(_SWEPT, dtype=torch.uint8, device="cpu")
    for _ in range(_REPEATS):
        data = [torch.ones(piece, dtype=torch.uint8, device=store.device) for _ in range(count)]
        seconds.append(_out_and_back(store, data, sweeping))
    return Link(latency, count * piece / max(statistics.median(seconds), 1e-9))


def _out_and_back(store: HostStore, data: list[Tensor], sweeping: Tensor | None = None) -> float:
    """Seconds of the slower of the two; what comes back comes into new memory. What is to be swept
    is written to before either.
    """
    seconds = []
    tickets: list[Any] = []
    found: list[Tensor] = []

    def out() -> None:
        tickets.extend(store.put(each) for each in data)

    def back() -> None:
        for each, ticket in zip(data, tickets, strict=True):
            found.append(torch.empty_like(each))
            store.take(ticket, found[-1])

    for way in (out, back):
        if sweeping is not None:
            sweeping.add_(1)
        start = perf_counter()
        way()
        seconds.append(perf_counter() - start)
    return max(seconds)
