"""How long actions and messages take, in seconds of ``perf_counter``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from time import perf_counter
from typing import Any, TypeVar

import torch

from autosplit.mesh.costs import Link
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.simulation.timeline import Span
from autosplit.pipeline.simulation.transfer import Transfer

from .groups import Groups

T = TypeVar("T")


class Recorder:
    """Records when things ran in one step at a time; for stages whose calls return when the work is
    done.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._noted: list[tuple[Action, Any, Any]] = []
        self._beside: list[Span] = []

    def begin(self) -> None:
        """Start a step."""
        self._noted, self._beside = [], []

    def run(self, action: Action, compute: Callable[[], T]) -> T:
        """Compute, and note when that was."""
        start = self._mark()
        result = compute()
        self._noted.append((action, start, self._mark()))
        return result

    def note(self, spans: Iterable[Span]) -> None:
        """Add what ran beside computation."""
        self._beside += spans

    def spans(self) -> list[Span]:
        """What the step ran, in the order in which it began; the device must be done with it."""
        computed = [
            Span(self._rank, action, self._seconds(start), self._seconds(end))
            for action, start, end in self._noted
        ]
        return sorted([*computed, *self._beside], key=lambda span: span.start)

    def _mark(self) -> Any:
        return perf_counter()

    def _seconds(self, mark: Any) -> float:
        return float(mark)


class DeviceRecorder(Recorder):
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
    return DeviceRecorder(rank, device) if device.type == "cuda" else Recorder(rank)


Pair = tuple[int, int]

_LARGE = 2**23  # bytes
_ROUNDS = 20
_WARMUP = 3


def ring(ranks: int) -> set[Pair]:
    """Each rank and the next, the last and the first; the lower one first."""
    steps = ((rank, (rank + 1) % ranks) for rank in range(ranks))
    return {(min(step), max(step)) for step in steps if ranks > 1}


def measure_transfer(groups: Groups, device: torch.device, pairs: Collection[Pair]) -> Transfer:
    """The links between these pairs of ranks, with the messages that a trainer's stages send.

    Each rank measures its pairs in one order that all have. Collective, between steps; all ranks
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
    mine = {pair: _between(groups, device, pair) for pair in sorted(pairs) if groups.rank in pair}
    links: dict[Pair, Link] = {}
    for found in groups.everybody.gather(mine):
        links = found | links  # of a pair's two ranks the lower one says, of replicas the first
    latency = max(link.latency for link in links.values())
    bandwidth = min(link.bandwidth for link in links.values())
    return Transfer(latency, bandwidth, pairs=links)


def _between(groups: Groups, device: torch.device, pair: Pair) -> Link:
    """By half of the quickest way there and back, of 1 byte and of many."""
    (peer,) = {*pair} - {groups.rank}

    def seconds(size: int) -> float:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        found = []
        for _ in range(_WARMUP + _ROUNDS):
            start = perf_counter()
            for sender in pair:
                work = (groups.isend if groups.rank == sender else groups.irecv)(tensor, peer)
                if work is not None:
                    with groups.losing(groups.named(peer)):
                        work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(perf_counter() - start)
        return min(found[_WARMUP:]) / 2.0

    small, large = seconds(1), seconds(_LARGE)
    return Link(small, _LARGE / max(large - small, 1e-9))
