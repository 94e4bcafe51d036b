"""Carries out the moves of a rank: what a microbatch holds is elsewhere for a while, in the host's
store or in the memory of a partner rank, which is a store behind another link.

What waits for what is said in ``schedule/moves.py``. A move only starts in its rank's place; the
transfer runs in a lane of its own. Storages are given up one by one as they leave, and made one by
one as they arrive.
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
from autosplit.pipeline.engine.host_store import HostStore
from autosplit.pipeline.schedule.moves import ActivationMove, find_moves, waited_departures
from autosplit.pipeline.schedule.schedule import LANES, Action, Schedule
from autosplit.pipeline.simulation.simulate import Span
from autosplit.ranks.first_error import ActionError, LostPeerError
from autosplit.ranks.groups import Groups, as_lost_peer
from autosplit.torch_internals.allocations import record_sizes


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


Move = Future[tuple[Any, float, float]]
"""A move of a step, from where its rank starts it until it has ended: what comes of it, and when
that was.
"""


class Lane:
    """A thread, and on an accelerator a stream, that carries out one move after another.

    Args:
        name: of the thread.
        device: where what it carries lies.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._device = device
        self._stream = OwnStream(device)

    def carry(self, action: Action, work: Callable[[], Any], *, counted: bool = False) -> Move:
        """Do ``work`` when all before it is done, and behind what the device was given so far.

        Args:
            action: the move.
            work: what is to be done.
            counted: whether another thread counts what this process allocates.
        """
        given, started = done_so_far(self._device), perf_counter()

        def run() -> tuple[Any, float, float]:
            sizes = record_sizes() if counted else contextlib.nullcontext()
            with self._stream.after(given), torch.inference_mode(False), sizes:
                return work(), started, perf_counter()

        return self._pool.submit(run)


Left = Sequence[tuple[int, Any]]
"""Of each storage that left, its bytes, and what the store gave for it."""


class PartnerStore:
    """The memory of a partner rank, over groups of the pair's own: each puts what the other takes.

    Args:
        groups: the trainer's process groups, in which the two are connected.
        partner: the other rank.
        device: where storages lie.
    """

    def __init__(self, groups: Groups, partner: int, device: torch.device) -> None:
        self._groups, self._partner, self._device = groups, partner, device

    def put(self, data: Tensor) -> None:
        """Send a storage."""
        self._run(self._groups.isend(data, self._partner, LANE))

    def take(self, ticket: None, data: Tensor) -> None:
        """Receive one."""
        self._run(self._groups.irecv(data, self._partner, LANE))

    def announce(self, storages: Sequence[Tensor]) -> None:
        """Send sizes ahead, which may depend on the data."""
        sizes = [len(storages), *(tensor.numel() for tensor in storages)]
        told = torch.zeros(_MOST, dtype=torch.int64, device=self._device)
        told[: len(sizes)] = torch.tensor(sizes, device=self._device)
        self.put(told)

    def announced(self) -> Left:
        """Hear what comes."""
        told = torch.zeros(_MOST, dtype=torch.int64, device=self._device)
        self.take(None, told)
        count, *sizes = told.tolist()
        return [(size, None) for size in sizes[:count]]

    def _run(self, work: dist.Work | None) -> None:
        # In another thread than that whose waits are watched.
        who = f"{self._groups.rank_name(self._partner)}, the partner"
        with as_lost_peer(contextlib.nullcontext, self._groups.timeout, who):
            if work is not None:
                work.wait()
            settle(self._device)


LANE = "memory"
"""The groups between partners."""
_MOST = 2**14
"""Storages of a microbatch that a partner takes, and their number."""


class Moves:
    """The moves of one rank under one schedule; the same every step.

    Creating one is collective over all ranks.

    Args:
        stages: the rank's stages by index.
        schedule: a legal schedule.
        groups: the trainer's process groups.
        device: where the stages run.
        store: the rank's store on the host, where it offloads.

    Attributes:
        transferred: counts what comes and goes.

    Raises:
        PipelineError: there is no store, or a stage whose microbatches are moved cannot do that.
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
        self._stages, self._store, self._device = stages, store, device
        self._rank = groups.rank
        self._row = schedule.ranks[groups.rank]
        self._timeout, self._place = groups.timeout, groups.activity
        self._starts: dict[int, Callable[[], Move]] = {}
        self._arrivals: dict[int, tuple[Any, int, int]] = {}
        self._awaited = dict(waited_departures(self._row))
        self._lanes = {name: Lane(f"autosplit-{name}", device) for name in {*LANES.values()}}
        self._counting = False
        journeys = find_moves(schedule)
        ends = ((each.rank, each.partner) for each in journeys if each.partner is not None)
        groups.connect({(min(pair), max(pair)) for pair in ends}, LANE)
        self._partner = PartnerStore(groups, schedule.partner(groups.rank), device)
        self._begun: dict[int, Move] = {}
        self._moving: dict[int, list[Tensor]] = {}
        self._kept: Callable[[int], Iterable[Tensor]] = lambda microbatch: ()
        for journey in journeys:
            if journey.rank == groups.rank:
                self._add(journey)
            elif journey.partner == groups.rank:
                self._add_guest(journey)

    @property
    def moving(self) -> list[Tensor]:
        """Storages that are leaving or arriving now, and those that are here for the partner."""
        return [tensor for each in [*self._moving.values()] for tensor in [*each]]

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around steps whose thread counts what this process allocates."""
        self._counting = self._device.type == "cpu"
        try:
            yield
        finally:
            self._counting = False

    def begin(self, kept: Callable[[int], Iterable[Tensor]]) -> None:
        """Start a step; ``kept`` are tensors of a microbatch that others hold besides stages."""
        self._begun.clear()
        self._moving.clear()
        self._kept = kept

    def start(self, place: int) -> None:
        """Start the move at a place of the row.

        Raises:
            ActionError: a move has failed.
            LostPeerError: the partner is gone.
        """
        for at, move in [*self._begun.items()]:
            if (
                move.done() and move.exception() is not None
            ):  # the first: others fail for want of it
                self._await(at)
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
                self._await(each)
            if arrival is not None:
                stage, microbatch, came = arrival
                tensors = self._await(came)
                take_over(tensors)
                stage.attach_held(microbatch, tensors)
                tensors.clear()

        return wait

    def finish(self) -> list[Span]:
        """End a step; when every move was, in the order of the row. Raises what ``start`` does."""
        for at in sorted(self._begun):
            self._await(at)
        moves = sorted(self._begun.items())
        self._begun.clear()
        return [Span(self._rank, self._row[at], *move.result()[1:]) for at, move in moves]

    def _add(self, journey: ActivationMove) -> None:
        """The two moves of what a stage holds."""
        stage: Any = self._stages.get(journey.stage)
        what = f"{self._row[journey.leaves]}"
        if not hasattr(stage, "detach_held"):
            raise PipelineError(
                f"{what} is scheduled, but what stage {journey.stage} holds "
                "cannot be moved: its class has no held(), detach_held() and attach_held(), see "
                "autosplit.Stage"
            )
        store = self._store if journey.partner is None else self._partner
        if store is None:
            raise PipelineError(f"{what} is scheduled, and there is no store for it")

        def leave() -> Move:
            kept = [*self._kept(journey.microbatch), *self._held_elsewhere(journey)]
            storages = stage.detach_held(journey.microbatch, kept)
            self._moving[journey.leaves] = storages

            def work() -> Left:
                if isinstance(store, PartnerStore):
                    store.announce(storages)
                return self._send(storages, store)

            return self._carry(journey.leaves, work)

        self._starts[journey.leaves] = leave
        self._starts[journey.comes] = self._arrival(
            journey.comes, lambda: self._begun[journey.leaves].result()[0], store
        )
        self._arrivals[journey.used] = stage, journey.microbatch, journey.comes

    def _add_guest(self, journey: ActivationMove) -> None:
        """The two moves of what the partner's stage holds."""
        partner, accepted = self._partner, journey.accepted

        def give_back() -> Move:
            came = self._begun[accepted]
            return self._carry(journey.returned, lambda: self._send(came.result()[0], partner))

        self._starts[accepted] = self._arrival(accepted, partner.announced, partner)
        self._starts[journey.returned] = give_back

    def _arrival(
        self, place: int, left: Callable[[], Left], store: HostStore | PartnerStore
    ) -> Callable[[], Move]:
        """What starts an arrival at a place of the row, of what ``left`` tells."""

        def work() -> list[Tensor]:
            for each in self._awaited.get(place, ()):  # before memory is taken
                # What fails there is raised where the rank waits.
                with contextlib.suppress(Exception):
                    self._begun[each].result()
            found = self._moving[place] = []
            self._receive(left(), found, store)
            return found

        return lambda: self._carry(place, work)

    def _held_elsewhere(self, journey: ActivationMove) -> Iterator[Tensor]:
        """What the rank's other stages hold of the microbatch: an output here is an input there."""
        for index, stage in self._stages.items():
            if index != journey.stage and hasattr(stage, "held"):
                with contextlib.suppress(SplitError):  # nothing any more, or not yet
                    yield from stage.held(journey.microbatch)

    def _carry(self, place: int, work: Callable[[], Any]) -> Move:
        action = self._row[place]
        return self._lanes[LANES[action.kind]].carry(action, work, counted=self._counting)

    def _send(self, storages: list[Tensor], store: HostStore | PartnerStore) -> Left:
        """Empties the list as its storages leave."""
        storages.reverse()
        left = []
        while storages:
            size = storages[-1].numel()
            left.append((size, store.put(storages[-1])))
            storages.pop()
            self.transferred.change(-size)
        return left

    def _receive(self, left: Left, found: list[Tensor], store: HostStore | PartnerStore) -> None:
        """Into a list, in which each storage is from when there is room for it."""
        for size, ticket in left:
            self.transferred.change(size)
            found.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            store.take(ticket, found[-1])

    def _await(self, place: int) -> Any:
        move, action = self._begun[place], self._row[place]
        try:
            if move.done() or action.kind.is_shared:
                return move.result()[0]
            with self._place.during_wait(action):  # for this rank's host alone, and no other rank
                return move.result(self._timeout)[0]
        except LostPeerError:
            raise
        except TimeoutError:
            late = PipelineError(
                f"the store on this host has had {self._timeout:.3g} s for {action}: it hangs, or "
                "needs a longer timeout="
            )
            raise ActionError(action) from late
        except Exception as error:
            raise ActionError(action) from error
