"""The process groups that one trainer owns, and how to end every wait on them.

Gloo as it is (torch 2.13, seen running): neither ``abort()`` nor ``destroy_process_group`` ends
a wait of a peer while anything still refers to the group, so a rank that failed but lives on
would leave its peers waiting until the timeout. A receive that times out, however, closes its
connection at once, on both ends and for everything else under way on it. ``close`` uses that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.mesh.costs import backend_for
from autosplit.mesh.dimensions import RankLayout
from autosplit.ranks.control import OTHERS, Control
from autosplit.ranks.first_error import LostPeerError, RankActivity

if TYPE_CHECKING:
    from autosplit.ranks.first_error import Guard


def greet(link: Groups, pairs: Iterable[tuple[int, int]], device: torch.device, lane: str) -> None:
    """Exchange a first message each way between pairs of ranks, in one order on all ranks.

    NCCL connects two ranks at their first message, and the host waits for the other end. In a
    step the one would wait where it posts a receive, and the other, which has yet to compute what
    it sends, where it posts one for the other direction.
    """
    for low, high in pairs:
        for source, target in ((low, high), (high, low)):
            if link.rank not in (source, target):
                continue
            tensor = torch.zeros(1, device=device)
            sends = link.rank == source
            work = link.isend(tensor, target, lane) if sends else link.irecv(tensor, source, lane)
            if work is not None:
                work.wait()


def await_device(device: torch.device, guard: Guard, timeout: float) -> None:
    """Wait on the host until a GPU has done what it was given so far. Whoever then reads a number
    from it does not wait, which nothing would end if a message on the device never came.

    Raises:
        LostPeerError: another rank failed, or ``timeout`` seconds passed.
    """
    if device.type == "cuda":
        guard.wait(torch.cuda.current_stream(device).query, timeout)


def abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """End what is under way over some groups of NCCL or its like, all at once: ending one waits for
    the device, on which a message of another hangs until that is ended.
    """
    if groups:
        with ThreadPoolExecutor(len(groups), "autosplit-abort") as pool:
            for each in [pool.submit(group.abort) for group in groups]:
                each.result()


# Tags keep the closing receives apart from real messages: a message that met a buffer of another
# size would end the whole process.
_TAG, _CLOSING_TAG = 0, 2**31 - 1
_AT_ONCE = timedelta(milliseconds=1)


class Groups(Control):
    """Groups over all ranks for control, and one for each direction of travel.

    NCCL runs the operations of one communicator in the order in which they were enqueued and may
    not complete a send before its receive is posted, so a receive posted early would hold up a
    send if the two directions shared a communicator, or two peers. So each direction of each pair
    has a group of its own, which ``connect`` makes, over Gloo as well: one of all ranks would be a
    single communicator where the default group is bound to a device. Control is Gloo on every
    device: its few numbers are needed on the host.

    Where several pipelines train replicas of one model, ranks are numbered within the pipeline
    (but for ``everybody``), and each pipeline has groups of its own. They are made here rather than
    taken from a mesh: whoever fails must be able to end the waits of others.

    Creating one is collective: every rank of the default group must do so, in the same order.
    With one rank there are no groups and nothing here communicates.

    Args:
        ranks: 1, or the size of the default process group; or which ranks are in which pipeline.
        device: where the messages live; decides between Gloo and what has queues, as NCCL.
        timeout: seconds after which a wait fails.

    Attributes:
        layout: which ranks are in which pipeline.
        ranks: how many this pipeline has.
        rank: this rank within it.
        place: knows when this rank waits for others.
        everybody: control of all ranks, numbered as in the default process group.
    """

    def __init__(self, ranks: int | RankLayout, device: torch.device, timeout: float) -> None:
        self.layout = layout = ranks if isinstance(ranks, RankLayout) else RankLayout.alone(ranks)
        self._own = dist.get_rank() if len(layout.ranks) > 1 else 0
        self.timeout = timeout
        self.place = RankActivity()
        self._device = device
        self._backend = backend_for(device)
        self._beside: Control | None = None
        self._connected: set[tuple[str, int, int]] = set()
        self._owned: list[dist.ProcessGroup] = []
        self._lent: list[dist.ProcessGroup] = []
        self._lanes: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        super().__init__(layout.pipeline, self._own, None, self._lose, self._call)
        self._group = self.among(range(self.ranks), "gloo") if self.ranks > 1 else None
        self.everybody: Control = self
        if len(layout.pipelines) > 1:
            world = self._new(layout.ranks, "gloo")
            self.everybody = Control(layout.ranks, self._own, world, self._lose, self._call)

    def _call(self) -> str:
        return self.place.phase

    def named(self, peer: int) -> str:
        """What a rank of this pipeline is called in errors."""
        return f"rank {self.members[peer]}"

    def connect(self, pairs: Collection[tuple[int, int]], lane: str = "") -> None:
        """Make ready for messages between these pairs of ranks, the lower one first.

        Collective over all ranks, which all name the same pairs; they may name some again.

        Args:
            pairs: the ranks.
            lane: a name, of groups besides those of messages.

        Raises:
            LostPeerError: some rank did not take part.
        """
        new = sorted(pair for pair in {*pairs} if (lane, *pair) not in self._connected)
        self._connected.update((lane, *pair) for pair in new)
        with self.losing(OTHERS):
            for pair in new:
                for source, target in (pair, pair[::-1]):
                    if (group := self.among(pair)) is not None:
                        self._lanes[lane, source, target] = group
            if self._backend != "gloo":
                greet(self, new, self._device, lane)

    def between(self, source: int, target: int, lane: str = "") -> dist.ProcessGroup:
        """The group of a pair's own for what goes one way, after ``connect``."""
        group = self._lanes.get((lane, source, target))
        if group is None:
            raise PipelineError("this trainer was closed: build a new one")
        return group

    def isend(self, tensor: Tensor, peer: int, lane: str = "") -> dist.Work | None:
        """Start sending a contiguous tensor; None if there is nothing to wait for."""
        # As dist.isend does, without its checks.
        group = self.between(self.rank, peer, lane)
        return group.send([_bytes(tensor)], self.number_in_pair(peer), _TAG)

    def irecv(self, buffer: Tensor, peer: int, lane: str = "") -> dist.Work | None:
        """Start filling ``buffer``; None if there is nothing to wait for."""
        group = self.between(peer, self.rank, lane)
        return group.recv([_bytes(buffer)], self.number_in_pair(peer), _TAG)

    def number_in_pair(self, peer: int) -> int:
        """A rank's number in a group of it and this rank."""
        return int(self.members[peer] > self._own)

    def among(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup | None:
        """A new group of some ranks of this pipeline; collective over all ranks, of all pipelines.
        None if this rank is not in.
        """
        pipelines = self.layout.pipelines
        return self.of([[pipeline[rank] for rank in ranks] for pipeline in pipelines], backend)

    def of(
        self, sets: Sequence[Sequence[int]], backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """New groups of sets of ranks, as the default process group numbers them: that of this
        rank, None if it is in none; collective over all ranks.
        """
        groups = [(self._new(ranks, backend), ranks) for ranks in sets]
        return next((group for group, ranks in groups if self._own in ranks), None)

    def of_several(self, sets: Sequence[Sequence[int]]) -> tuple[int, dist.ProcessGroup | None]:
        """The first rank of this rank's set, or itself, and ``of``; None where every rank is alone
        in its set.
        """
        first = next((ranks[0] for ranks in sets if self._own in ranks), self._own)
        return first, self.of(sets) if len(sets[0]) > 1 else None

    def beside(self) -> Control:
        """All ranks over a group of its own, for what a thread does beside the steps, one such
        thing at a time; collective over all ranks the first time.
        """
        if self._beside is None:
            ranks = self.everybody.members
            group = self._new(ranks, "gloo") if len(ranks) > 1 else None
            # In another thread than that whose waits are watched.
            unwatched = partial(losing, contextlib.nullcontext, self.timeout)
            self._beside = Control(ranks, self._own, group, unwatched)
        return self._beside

    def watch_lent(self, group: dist.ProcessGroup) -> None:
        """End the waits on a group of somebody else's, too, where this ends its own."""
        if group not in self._lent:
            self._lent.append(group)

    def _new(self, members: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        limit, backend = timedelta(seconds=self.timeout), backend or self._backend
        # With its device, it has its communicator now, and not at its first message.
        device = self._device if backend == "nccl" else None
        group = cast(
            "dist.ProcessGroup",
            dist.new_group(sorted(members), timeout=limit, backend=backend, device_id=device),
        )
        if self._own in members:
            self._owned.append(group)
        return group

    def _lose(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Wait for ``what``; a failed communication becomes a LostPeerError that says so."""
        return losing(self.place.waits, self.timeout, what)

    def cut(self) -> None:
        """End every wait of this rank, and those of its peers for it; in any thread."""
        self._end_waits([*self._owned, *self._lent])

    def close(self) -> None:
        """Let go of the groups and end every wait on them at once, here and on the peers."""
        groups = self._release()
        # On those of others, too: a collective that hangs there holds the device.
        self._end_waits([*groups, *self._lent] if dist.is_initialized() else [])
        for group in groups:
            if not _is_queued(group):
                dist.destroy_process_group(group)

    def _end_waits(self, groups: Iterable[dist.ProcessGroup]) -> None:
        queued = []
        for group in groups:
            # They may be let go of meanwhile.
            with contextlib.suppress(RuntimeError, ValueError):
                if _is_queued(group):
                    queued.append(group)
                    continue
                for peer in dist.get_process_group_ranks(group):
                    if peer != self._own:
                        disconnect(group, peer)
        with contextlib.suppress(RuntimeError, ValueError):
            abort(queued)

    def destroy(self) -> None:
        """Let go of the groups after a run that went well.

        Their connections end here. Left to the garbage collector, which comes when it likes, they
        have held up a step of the next trainer for a second (eight ranks on two cores).
        """
        for group in self._release():
            dist.destroy_process_group(group)
        self._lanes.clear()
        for control in (self, self.everybody, self._beside):
            if control is not None:
                control.let_go()

    def _release(self) -> list[dist.ProcessGroup]:
        owned, self._owned = self._owned, []
        # Destroying the default group has destroyed these as well.
        return owned if dist.is_initialized() else []


@contextlib.contextmanager
def losing(
    waits: Callable[[], contextlib.AbstractContextManager[None]], timeout: float, what: str
) -> Iterator[None]:
    """Within ``waits``, wait for what is so called; a failure becomes the LostPeerError for it."""
    started = time.perf_counter()
    try:
        with waits():
            yield
    except RuntimeError as error:
        raise lost(what, time.perf_counter() - started, timeout, error) from error


def _is_queued(group: dist.ProcessGroup) -> bool:
    """Whether what hangs there stands in queues, as NCCL's does, which only ``abort`` ends."""
    return dist.get_backend(group) != "gloo"


def _bytes(tensor: Tensor) -> Tensor:
    """Not every backend knows every dtype: none has complex numbers, NCCL no short integers."""
    # Contiguous tensors of one element may have any stride; views as bytes need 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def disconnect(group: dist.ProcessGroup, peer: int) -> None:
    """End every wait on a Gloo group between this rank and ``peer``, on both."""
    with contextlib.suppress(RuntimeError):
        work = dist.irecv(torch.empty(1, device="cpu"), src=peer, group=group, tag=_CLOSING_TAG)
        if work is not None:
            work.wait(_AT_ONCE)


def lost(what: str, waited: float, timeout: float, error: RuntimeError) -> LostPeerError:
    """The LostPeerError for a wait that failed with ``error`` after ``waited`` seconds."""
    if waited >= 0.99 * timeout:  # the backend measures by another clock
        so_long = f"waited {waited:.3g} s for {what}"
        return LostPeerError(f"{so_long}: is it stuck, or waiting itself?", so_long)
    # Gloo goes on with guesses and good wishes after the first sentence.
    reason = str(error).partition(". ")[0].partition("\n")[0]
    return LostPeerError(
        f"lost {what} (was a process killed, or has it closed its trainer?): {reason}"
    )
