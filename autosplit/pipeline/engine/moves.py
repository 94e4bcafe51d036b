"""Carries out the moves of a rank: what a microbatch holds goes elsewhere for a while.

What waits for what is said in ``schedule/moves.py``. A move only starts in its rank's place; the
transfer runs in a lane of its own. Storages are given up one by one as they leave, and made one by
one as they arrive.

Between partner ranks they travel over process groups of their own. The sizes go ahead, for they may
depend on the data. Then comes one storage after the other: the sender lets each go as soon as it
has left, and the receiver makes room for it when its turn comes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.device import OwnStream, done_so_far, settle, take_over
from autosplit.errors import PipelineError, SplitError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import Journey, journeys_of, waited_departures
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.timeline import Span
from autosplit.torch_internals.allocations import sizes_known

from .first_error import ActionError, LostPeerError
from .groups import Groups, losing
from .host_store import HostStore


class TransferredBytes:
    """Counts from any thread what comes, from when its memory is made, and what has gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._highest = 0

    def change(self, more: int) -> None:
        """There are so many bytes more, or fewer."""
        with self._lock:
            self._now += more
            self._highest = max(self._highest, self._now)

    def most(self) -> int:
        """The most that there were at any time since the last call, above those at that call."""
        with self._lock:
            found = self._highest
            self._now = self._highest = 0
        return found


class Move:
    """One move of a step, from where its rank starts it until it has ended.

    Attributes:
        action: the move.
        ended: when.
        future: what comes of it.
    """

    future: Future[Any]

    def __init__(self, action: Action) -> None:
        self.action = action
        self._started = perf_counter()
        self.ended = 0.0

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.future.done() and self.future.exception() is not None

    def span(self, rank: int) -> Span:
        """When that was."""
        return Span(rank, self.action, self._started, self.ended)


class Lane:
    """A thread, and on an accelerator a stream, that carries out one move after another.

    Args:
        name: of the thread.
        device: where what it carries lies.

    Attributes:
        counted: whether another thread counts what this process allocates.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._device = device
        self._stream = OwnStream(device)
        self.counted = False

    def carry(self, move: Move, work: Callable[[], Any]) -> Move:
        """Do ``work`` when all before it is done, and behind what the device was given so far."""
        given = done_so_far(self._device)
        counted = self.counted and self._device.type == "cpu"

        def run() -> Any:
            sizes = sizes_known() if counted else contextlib.nullcontext()
            try:
                with self._stream.behind(given), torch.inference_mode(False), sizes:
                    return work()
            finally:
                move.ended = perf_counter()

        move.future = self._pool.submit(run)
        return move


LANE = "memory"
"""The lanes between partners."""


Left = Sequence[tuple[int, Any]]
"""Of each storage that left, its bytes, and what a store gave for it."""


class StorageLink:
    """Where storages go, and come from, one after the other.

    Args:
        device: where they lie.
        transferred: is told what comes and goes.
        put: sends one and gives a ticket for it; it is also told whose it is, for errors.
        take: fills one, of such a ticket.
    """

    def __init__(
        self,
        device: torch.device,
        transferred: TransferredBytes,
        put: Callable[[Tensor, str], Any],
        take: Callable[[Tensor, str, Any], None],
    ) -> None:
        self._device, self._transferred = device, transferred
        self._put, self._take = put, take

    def send(self, storages: list[Tensor], what: str) -> Left:
        """Send storages; empties the list as they leave.

        Args:
            storages: what.
            what: whose they are, for errors.

        Raises:
            LostPeerError: the partner did not take them.
            PipelineError: the store cannot keep them.
        """
        storages.reverse()
        left = []
        while storages:
            size = storages[-1].numel()
            left.append((size, self._put(storages[-1], what)))
            storages.pop()
            self._transferred.change(-size)
        return left

    def receive(self, left: Left, what: str, found: list[Tensor]) -> None:
        """Receive what left into a list, in which each is from when there is room for it. Errors as
        for ``send``.
        """
        for size, ticket in left:
            self._transferred.change(size)
            found.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            self._take(found[-1], what, ticket)

    leave = send


class PartnerLink(StorageLink):
    """This rank's end of the two lanes between it and its partner.

    Args:
        groups: the trainer's process groups, in which the two are connected.
        partner: the other rank.
        device: where storages lie.
        transferred: is told what comes and goes.
    """

    def __init__(
        self, groups: Groups, partner: int, device: torch.device, transferred: TransferredBytes
    ) -> None:
        super().__init__(device, transferred, self._send, self._receive)
        self._name = groups.named(partner)
        self._number = groups.number_in_pair(partner)
        self._timeout = groups.timeout
        self._out = groups.between(groups.rank, partner, LANE)
        self._in = groups.between(partner, groups.rank, LANE)

    def leave(self, storages: list[Tensor], what: str) -> Left:
        """Send storages behind their sizes, which may depend on the data."""
        sizes = [tensor.numel() for tensor in storages]
        self._send(self._numbers([len(sizes)]), what)
        if sizes:
            self._send(self._numbers(sizes), what)
        return self.send(storages, what)

    def announced(self, what: str) -> Left:
        """Hear what comes; errors as for ``send``."""
        count = self._numbers([0])
        self._receive(count, what)
        sizes = self._numbers([0] * int(count))
        if len(sizes):
            self._receive(sizes, what)
        return [(size, None) for size in sizes.tolist()]

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _send(self, data: Tensor, what: str) -> None:
        self._run(self._out.send([data], self._number, 0), what)

    def _receive(self, data: Tensor, what: str, ticket: None = None) -> None:
        self._run(self._in.recv([data], self._number, 0), what)

    def _run(self, work: dist.Work | None, what: str) -> None:
        # In another thread than that whose waits are watched.
        with losing(contextlib.nullcontext, self._timeout, f"{self._name}, the partner for {what}"):
            if work is not None:
                work.wait()
            settle(self._device)


class Moves:
    """The moves of one rank under one schedule; the same every step.

    Creating one is collective over all ranks.

    Args:
        stages: the rank's stages by index.
        schedule: a legal schedule.
        groups: the trainer's process groups, over which partners are connected.
        device: where the stages run.
        store: the rank's store on the host, where it offloads.

    Attributes:
        transferred: counts what comes and goes.
        times: how long moves kept the rank's own thread.

    Raises:
        PipelineError: a stage whose microbatches are moved cannot do that.
        LostPeerError: some rank did not take part.
    """

    def __init__(
        self,
        stages: Mapping[int, Any],
        schedule: Schedule,
        groups: Groups,
        device: torch.device,
        store: HostStore | None = None,
    ) -> None:
        self.transferred = TransferredBytes()
        self._stages = stages
        self._rank = rank = groups.rank
        self._row = schedule.ranks[rank]
        self._moved = schedule.moved
        self._store: StorageLink | None = None
        if store is not None:
            self._store = StorageLink(
                device,
                self.transferred,
                lambda data, what: store.put(data),
                lambda data, what, ticket: store.take(ticket, data),
            )
        self._partner: PartnerLink | None = None
        ends = [(e.rank, e.partner) for e in journeys_of(schedule) if e.partner is not None]
        pairs = {(min(pair), max(pair)) for pair in ends}
        groups.connect(pairs, LANE)
        for pair in (pair for pair in pairs if rank in pair):
            (other,) = {*pair} - {rank}
            self._partner = PartnerLink(groups, other, device, self.transferred)
        self._timeout = groups.timeout
        self._place = groups.place
        self._starts: dict[int, Callable[[], Move]] = {}
        self._arrivals: dict[int, tuple[Any, int, int]] = {}
        self._awaited = dict(waited_departures(self._row))
        self._lanes = {
            kind: Lane(f"autosplit-{kind.value.lower()}", device) for kind in _LANES.values()
        }
        self._begun: dict[int, Move] = {}
        self._moving: dict[int, list[Tensor]] = {}
        self._guests: dict[int, list[Tensor]] = {}
        self._kept: Callable[[int], Iterable[Tensor]] = lambda microbatch: ()
        for journey in journeys_of(schedule):
            if journey.rank == rank:
                self._add_own(journey)
            if journey.partner == rank:
                self._add_guest(journey)

    @property
    def moving(self) -> list[Tensor]:
        """Storages of this rank's own stages that are leaving or arriving now."""
        return [tensor for each in [*self._moving.values()] for tensor in [*each]]

    @property
    def guests(self) -> list[Tensor]:
        """Storages that are here for the partner."""
        return [tensor for each in [*self._guests.values()] for tensor in [*each]]

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around steps whose thread counts what this process allocates."""
        for lane in self._lanes.values():
            lane.counted = True
        try:
            yield
        finally:
            for lane in self._lanes.values():
                lane.counted = False

    def begin(self, kept: Callable[[int], Iterable[Tensor]]) -> None:
        """Start a step; ``kept`` are tensors of a microbatch that others hold besides stages."""
        for each in (self._begun, self._moving, self._guests):
            each.clear()
        self._kept = kept

    def start(self, place: int) -> None:
        """Start the move at a place of the row.

        Raises:
            ActionError: a move has failed.
            LostPeerError: the partner is gone.
        """
        self._raise_failed()
        self._begun[place] = self._starts[place]()

    def needed(self, place: int) -> Callable[[], None] | None:
        """The call that waits for all that the action at a place needs of moves, and puts back
        what was away. It raises what ``start`` does. None where nothing is needed.
        """
        departures = self._awaited.get(place, ())
        arrival = self._arrivals.get(place)
        if not departures and arrival is None:
            return None

        def wait() -> None:
            for each in departures:
                self._await(self._begun[each])
            if arrival is not None:
                stage, microbatch, came = arrival
                tensors = self._await(self._begun[came])
                take_over(tensors)
                stage.attach_held(microbatch, tensors)
                tensors.clear()

        return wait

    def finish(self) -> list[Span]:
        """End a step; when every move was, in the order of the row. Raises what ``start`` does."""
        moves = [move for _, move in sorted(self._begun.items())]
        for move in moves:
            self._await(move)
        self._begun.clear()
        return [move.span(self._rank) for move in moves]

    # --- the moves --------------------------------------------------------------------------------

    def _add_own(self, journey: Journey) -> None:
        """Those of what a stage of this rank holds."""
        stage, what = self._stages.get(journey.stage), f"{self._row[journey.leaves]}"
        if not hasattr(stage, "detach_held"):
            raise PipelineError(
                f"{what} is scheduled, but what stage {journey.stage} holds "
                "cannot be moved: its class has no held(), detach_held() and attach_held(), see "
                "autosplit.Stage"
            )
        away = self._store if journey.partner is None else self._partner
        if away is None:
            raise PipelineError(f"{what} is scheduled, and there is no store or partner for it")

        def leave() -> Move:
            storages = self._detached(journey, stage)
            return self._carry(journey.leaves, lambda: away.leave(storages, what))

        def come() -> Move:
            begun = self._begun[journey.leaves]

            def work() -> list[Tensor]:
                self._wait_for_departures(journey.comes)
                left = begun.future.result()  # all is there, but may not have been let go of here
                found = self._moving[journey.comes] = []
                away.receive(left, what, found)
                return found

            return self._carry(journey.comes, work)

        self._starts[journey.leaves] = leave
        self._starts[journey.comes] = come
        self._arrivals[journey.used] = stage, journey.microbatch, journey.comes

    def _add_guest(self, journey: Journey) -> None:
        """Those of what the partner's stage holds."""
        link, what = self._partner, f"{self._row[journey.accepted]}"
        if link is None:
            raise PipelineError(f"{what} is scheduled, and there is no partner for it")

        def accept() -> Move:
            def work() -> list[Tensor]:
                self._wait_for_departures(journey.accepted)
                found = self._guests[journey.accepted] = []
                link.receive(link.announced(what), what, found)
                return found

            return self._carry(journey.accepted, work)

        def give_back() -> Move:
            accepted = self._begun[journey.accepted]
            return self._carry(journey.returned, lambda: link.send(accepted.future.result(), what))

        self._starts[journey.accepted] = accept
        self._starts[journey.returned] = give_back

    def _detached(self, journey: Journey, stage: Any) -> list[Tensor]:
        """What the microbatch holds alone, taken out of the stage."""
        microbatch = journey.microbatch
        kept = [*self._kept(microbatch), *self._held_elsewhere(journey)]
        found: list[Tensor] = stage.detach_held(microbatch, self._moved.get(journey.stage), kept)
        self._moving[journey.leaves] = found
        return found

    def _held_elsewhere(self, journey: Journey) -> Iterator[Tensor]:
        """What the rank's other stages hold of the microbatch: an output here is an input there."""
        for index, stage in self._stages.items():
            if index != journey.stage and hasattr(stage, "held"):
                with contextlib.suppress(SplitError):  # nothing any more, or not yet
                    yield from stage.held(journey.microbatch)

    def _carry(self, place: int, work: Callable[[], Any]) -> Move:
        action = self._row[place]
        return self._lanes[_LANES[action.kind]].carry(Move(action), work)

    def _wait_for_departures(self, place: int) -> None:
        """In a lane, before memory is taken. What fails there is raised where the rank waits."""
        for each in self._awaited.get(place, ()):
            with contextlib.suppress(Exception):
                self._begun[each].future.result()

    # --- waiting ----------------------------------------------------------------------------------

    def _await(self, move: Move) -> Any:
        if move.failed:
            self._raise_failed()
        if move.future.done() or move.action.kind not in _BY_HOST:
            return self._result(move)
        with self._place.waits(move.action):  # for this rank's host alone, and no other rank
            return self._result(move, self._timeout)

    def _result(self, move: Move, timeout: float | None = None) -> Any:
        try:
            return move.future.result(timeout)
        except LostPeerError:
            raise
        except TimeoutError:
            late = PipelineError(
                f"the store on this host has had {self._timeout:.3g} s for {move.action}: it "
                "hangs, or needs a longer timeout="
            )
            raise ActionError(move.action) from late
        except Exception as error:
            raise ActionError(move.action) from error

    def _raise_failed(self) -> None:
        """Raise what the first that failed did: others fail for want of it."""
        for move in [*self._begun.values()]:
            if move.failed:
                self._result(move)


_LANES = {
    ActionKind.EVICT: ActionKind.EVICT,
    ActionKind.RETURN: ActionKind.EVICT,
    ActionKind.ACCEPT: ActionKind.ACCEPT,
    ActionKind.LOAD: ActionKind.ACCEPT,
    ActionKind.OFFLOAD: ActionKind.OFFLOAD,
    ActionKind.RELOAD: ActionKind.RELOAD,
}
"""Move -> the first of those that go one after another with it."""

_BY_HOST = frozenset({ActionKind.OFFLOAD, ActionKind.RELOAD})
