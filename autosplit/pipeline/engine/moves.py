"""Carry out moves of activations. Tensors of a microbatch are kept for a while in an offload target
on the host or in the memory of a partner rank.

``schedule/moves.py`` says which action waits for which move. At its place in the row, a move only
starts its transfer, which a ``Lane`` runs. Storages are freed one by one as they leave, and
allocated one by one as they arrive.
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
from autosplit.pipeline.engine.offload_target import OffloadTarget
from autosplit.pipeline.schedule.moves import ActivationMove, waited_departures
from autosplit.pipeline.schedule.schedule import LANES
from autosplit.pipeline.simulation.prepared import PreparedSchedule
from autosplit.pipeline.simulation.simulate import Span
from autosplit.ranks.first_error import ActionError, LostPeerError
from autosplit.ranks.groups import Groups, as_lost_peer
from autosplit.torch_internals.allocations import record_sizes


class TransferredBytes:
    """Net bytes that transfers have allocated and freed; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._highest = 0

    def add_bytes(self, more: int) -> None:
        """Add to the count: positive when memory is allocated, negative when it is freed."""
        with self._lock:
            self._now += more
            self._highest = max(self._highest, self._now)

    def peak(self) -> int:
        """The largest count since the last call, relative to the count at that call."""
        with self._lock:
            peak = self._highest
            self._now = self._highest = 0
        return peak


TransferFuture = Future[tuple[Any, float, float]]
"""A running transfer: its result, and when it started and ended."""


class Lane:
    """A thread, and on an accelerator a stream, that runs one transfer after another.

    Args:
        name: the name of the thread.
        device: the device of the moved tensors.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._device = device
        self._stream = OwnStream(device)

    def carry(self, work: Callable[[], Any], *, counted: bool) -> TransferFuture:
        """Run a transfer on the lane's thread, after the lane's earlier transfers and after the
        kernels launched so far.

        Args:
            work: the transfer.
            counted: whether another thread is recording the memory of the step, so that the
                transfer's allocations must be counted.
        """
        launched, started = done_so_far(self._device), perf_counter()

        def run() -> tuple[Any, float, float]:
            sizes = record_sizes() if counted else contextlib.nullcontext()
            with self._stream.after(launched), torch.inference_mode(False), sizes:
                return work(), started, perf_counter()

        return self._pool.submit(run)


Tickets = Sequence[tuple[int, Any]]
"""For each storage that has left, its bytes and the ticket of the target."""


class PartnerMemory:
    """The memory of a partner rank as an offload target: each ``put`` sends to the partner's
    ``take``.

    Args:
        groups: the trainer's process groups, in which the two ranks are connected.
        partner: the partner rank.
        device: the device of the storages.
    """

    def __init__(self, groups: Groups, partner: int, device: torch.device) -> None:
        self._groups, self._partner, self._device = groups, partner, device

    def put(self, data: Tensor) -> None:
        """Send the bytes of a storage to the partner rank."""
        self._run(self._groups.isend(data, self._partner, LANE))

    def take(self, ticket: None, data: Tensor) -> None:
        """Receive the bytes of a storage from the partner rank."""
        self._run(self._groups.irecv(data, self._partner, LANE))

    def announce(self, storages: Sequence[Tensor]) -> None:
        """Send the sizes of storages before the storages, because sizes may depend on data."""
        sizes = [len(storages), *(tensor.numel() for tensor in storages)]
        message = torch.zeros(_MAX_STORAGES, dtype=torch.int64, device=self._device)
        message[: len(sizes)] = torch.tensor(sizes, device=self._device)
        self.put(message)

    def announced(self) -> Tickets:
        """Receive the sizes of the storages that the partner will send."""
        message = torch.zeros(_MAX_STORAGES, dtype=torch.int64, device=self._device)
        self.take(None, message)
        count, *sizes = message.tolist()
        return [(size, None) for size in sizes[:count]]

    def _run(self, work: dist.Work | None) -> None:
        # This runs in a lane's thread; only waits of the rank's own thread are watched.
        who = f"{self._groups.rank_name(self._partner)}, the partner"
        with as_lost_peer(contextlib.nullcontext, self._groups.timeout, who):
            if work is not None:
                work.wait()
            settle(self._device)


LANE = "memory"
"""The name of the process groups between partners."""
_MAX_STORAGES = 2**14
"""Length of the message with sizes: their count, and the sizes."""


class Moves:
    """The moves of one rank under one schedule. Every step has the same moves.

    Collective: all ranks must construct it together.

    Args:
        stages: the rank's stages by index.
        prepared: a legal schedule, with its moves.
        groups: the trainer's process groups.
        device: the device of the stages.
        target: the rank's offload target; None if the rank offloads nothing.

    Attributes:
        transferred: counts the bytes that transfers allocate and free.

    Raises:
        PipelineError: there is no offload target, or a stage does not support moves.
        LostPeerError: another rank did not take part.
    """

    def __init__(
        self,
        stages: Mapping[int, Any],
        prepared: PreparedSchedule,
        groups: Groups,
        device: torch.device,
        target: OffloadTarget | None = None,
    ) -> None:
        schedule = prepared.schedule
        self.transferred = TransferredBytes()
        self._stages, self._target, self._device = stages, target, device
        self._rank = groups.rank
        self._row = schedule.ranks[groups.rank]
        self._timeout, self._activity = groups.timeout, groups.activity
        self._starts: dict[int, Callable[[], TransferFuture]] = {}
        self._arrivals: dict[int, tuple[Any, int, int]] = {}
        self._waited_departures = dict(waited_departures(self._row))
        self._lanes = {name: Lane(f"autosplit-{name}", device) for name in {*LANES.values()}}
        self._counting = False
        groups.connect(prepared.partner_pairs, LANE)
        self._partner = PartnerMemory(groups, schedule.partner(groups.rank), device)
        self._transfers: dict[int, TransferFuture] = {}
        self._in_transit: dict[int, list[Tensor]] = {}
        self._other_references: Callable[[int], Iterable[Tensor]] = lambda microbatch: ()
        for move in prepared.moves:
            if move.rank == groups.rank:
                self._add(move)
            elif move.partner == groups.rank:
                self._add_partner_move(move)

    @property
    def storages_in_transit(self) -> list[Tensor]:
        """Storages that are leaving or arriving now, and storages that are kept for the partner."""
        # Copies, because lanes change these lists.
        return [tensor for storages in [*self._in_transit.values()] for tensor in [*storages]]

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Context for steps whose memory another thread records: transfers count their
        allocations.
        """
        self._counting = self._device.type == "cpu"
        try:
            yield
        finally:
            self._counting = False

    def begin_step(self, other_references: Callable[[int], Iterable[Tensor]]) -> None:
        """Prepare for the moves of a new step.

        Args:
            other_references: a function that returns the tensors of a microbatch to which callers
                also refer, so that moving them would free no memory.
        """
        self._transfers.clear()
        self._in_transit.clear()
        self._other_references = other_references

    def start(self, place: int) -> None:
        """Start the move at a place of the row.

        Raises:
            ActionError: a move has failed.
            LostPeerError: the partner is gone.
        """
        for earlier, transfer in [*self._transfers.items()]:
            # Raise the first error, which later transfers may fail from.
            if transfer.done() and transfer.exception() is not None:
                self._await(earlier)
        self._transfers[place] = self._starts[place]()

    def wait_before(self, place: int) -> Callable[[], None] | None:
        """The call to make before the action at a place of the row; None if it needs no move.

        The call waits for the departures and the arrival that the action needs, and returns the
        tensors to the stage. It raises the same errors as ``start``.
        """
        departures = self._waited_departures.get(place, ())
        arrival = self._arrivals.get(place)
        if not departures and arrival is None:
            return None

        def wait_for_moves() -> None:
            for departure in departures:
                self._await(departure)
            if arrival is not None:
                stage, microbatch, arrival_place = arrival
                tensors = self._await(arrival_place)
                take_over(tensors)
                stage.attach_held(microbatch, tensors)
                tensors.clear()

        return wait_for_moves

    def finish_step(self) -> list[Span]:
        """Wait for the moves of the step, and return their spans in the order of the row.

        Raises:
            ActionError, LostPeerError: as ``start``.
        """
        for place in sorted(self._transfers):
            self._await(place)
        transfers = sorted(self._transfers.items())
        self._transfers.clear()
        return [Span(self._rank, self._row[at], *future.result()[1:]) for at, future in transfers]

    def _add(self, move: ActivationMove) -> None:
        """Bind a move of this rank's stage to the row: its departure and its arrival."""
        stage: Any = self._stages.get(move.stage)
        action = self._row[move.leaves]
        if not hasattr(stage, "detach_held"):
            raise PipelineError(
                f"{action} is scheduled, but the tensors of stage {move.stage} cannot be moved: "
                "its class has no held(), detach_held() and attach_held(), see autosplit.Stage"
            )
        target = self._target if move.partner is None else self._partner
        if target is None:
            raise PipelineError(
                f"{action} is scheduled, but this rank has no offload target: pass "
                "Moves(target=...)"
            )

        def start_departure() -> TransferFuture:
            """Detach the tensors from the stage, and start their transfer."""
            shared = [
                *self._other_references(move.microbatch),
                *self._tensors_of_other_stages(move),
            ]
            storages = stage.detach_held(move.microbatch, shared)
            self._in_transit[move.leaves] = storages

            def work() -> Tickets:
                if isinstance(target, PartnerMemory):
                    target.announce(storages)
                return self._send(storages, target)

            return self._submit(move.leaves, work)

        self._starts[move.leaves] = start_departure
        self._starts[move.comes] = self._arrival(
            move.comes, lambda: self._transfers[move.leaves].result()[0], target
        )
        self._arrivals[move.used] = stage, move.microbatch, move.comes

    def _add_partner_move(self, move: ActivationMove) -> None:
        """Bind a move of the partner's stage to the row: the arrival here, and the return."""
        partner, accepted = self._partner, move.accepted

        def start_return() -> TransferFuture:
            arrival = self._transfers[accepted]
            return self._submit(move.returned, lambda: self._send(arrival.result()[0], partner))

        self._starts[accepted] = self._arrival(accepted, partner.announced, partner)
        self._starts[move.returned] = start_return

    def _arrival(
        self, place: int, tickets: Callable[[], Tickets], target: OffloadTarget | PartnerMemory
    ) -> Callable[[], TransferFuture]:
        """The call that starts an arrival at a place of the row."""

        def work() -> list[Tensor]:
            """Wait until departures have freed memory, then receive."""
            for departure in self._waited_departures.get(place, ()):
                # The rank raises the error of a departure where it waits for it.
                with contextlib.suppress(Exception):
                    self._transfers[departure].result()
            storages = self._in_transit[place] = []
            self._receive(tickets(), storages, target)
            return storages

        return lambda: self._submit(place, work)

    def _tensors_of_other_stages(self, move: ActivationMove) -> Iterator[Tensor]:
        """Tensors of the microbatch that other stages of this rank hold as inputs. They may be
        outputs of the moved stage.
        """
        for index, stage in self._stages.items():
            if index != move.stage and hasattr(stage, "held"):
                with contextlib.suppress(SplitError):  # the stage holds nothing of it
                    yield from stage.held(move.microbatch)

    def _submit(self, place: int, work: Callable[[], Any]) -> TransferFuture:
        lane = self._lanes[LANES[self._row[place].kind]]
        return lane.carry(work, counted=self._counting)

    def _send(self, storages: list[Tensor], target: OffloadTarget | PartnerMemory) -> Tickets:
        """Send storages one by one, and remove each from the list when it was sent; return their
        tickets.
        """
        storages.reverse()
        tickets = []
        while storages:
            size = storages[-1].numel()
            tickets.append((size, target.put(storages[-1])))
            storages.pop()
            self.transferred.add_bytes(-size)
        return tickets

    def _receive(
        self, tickets: Tickets, storages: list[Tensor], target: OffloadTarget | PartnerMemory
    ) -> None:
        """Receive storages one by one, and add each to the list when it is allocated."""
        for size, ticket in tickets:
            self.transferred.add_bytes(size)
            storages.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            target.take(ticket, storages[-1])

    def _await(self, place: int) -> Any:
        """Wait for the transfer at a place of the row, and return its result."""
        transfer, action = self._transfers[place], self._row[place]
        try:
            if transfer.done() or action.kind.is_shared:
                return transfer.result()[0]
            with self._activity.during_wait(action):  # for this rank's host, not for another rank
                return transfer.result(self._timeout)[0]
        except LostPeerError:
            raise
        except TimeoutError:
            timeout = PipelineError(
                f"{action} did not finish on this host within {self._timeout:.3g} s: the disk or "
                "the copy hangs, or needs a longer timeout="
            )
            raise ActionError(action) from timeout
        except Exception as error:
            raise ActionError(action) from error
