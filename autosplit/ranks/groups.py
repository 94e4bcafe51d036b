"""The process groups that one trainer owns, and ways to end every wait on them.

With Gloo (observed with torch 2.13), neither ``abort()`` nor ``destroy_process_group`` ends a wait
of a peer while an object refers to the group. So the peers of a rank that failed but lives on would
wait until the timeout. A receive that times out, however, closes its connection at once, on both
ends and for every other operation on it. ``close`` posts such a receive to end all waits.
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
from autosplit.ranks.control import ALL_PEERS, Control
from autosplit.ranks.first_error import LostPeerError, RankActivity

if TYPE_CHECKING:
    from autosplit.ranks.first_error import Guard


def open_connections(
    groups: Groups, pairs: Iterable[tuple[int, int]], device: torch.device, lane: str
) -> None:
    """Exchange a first message each way between pairs of ranks, in one order on all ranks.

    NCCL connects two ranks at their first message, and the host waits for the other end. In a
    step, one rank would wait where it posts a receive, while its peer, which has yet to compute
    the message, waits where it posts a receive for the other direction.
    """
    for low, high in pairs:
        for source, target in ((low, high), (high, low)):
            if groups.rank not in (source, target):
                continue
            tensor = torch.zeros(1, device=device)
            sends = groups.rank == source
            if sends:
                work = groups.isend(tensor, target, lane)
            else:
                work = groups.irecv(tensor, source, lane)
            if work is not None:
                work.wait()


def await_device(device: torch.device, guard: Guard, timeout: float) -> None:
    """Wait on the host until a GPU has finished its queued work.

    Call it before a number is read from the device. The read itself has no timeout: it would wait
    forever if the device waited for a message that never comes.

    Raises:
        LostPeerError: another rank failed, or ``timeout`` seconds passed.
    """
    if device.type == "cuda":
        guard.wait(torch.cuda.current_stream(device).query, timeout)


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort groups of NCCL, or of another backend with queues, all at once.

    The groups must be aborted together: the abort of one group waits for the device, where messages
    of other groups may hang.
    """
    if groups:
        with ThreadPoolExecutor(len(groups), "autosplit-abort") as pool:
            for aborted in [pool.submit(group.abort) for group in groups]:
                aborted.result()


# Tags separate the closing receives from real messages: a message received into a buffer of another
# size would end the whole process.
_TAG, _CLOSING_TAG = 0, 2**31 - 1
_AT_ONCE = timedelta(milliseconds=1)


class Groups(Control):
    """The process groups of a trainer: control over all ranks, and one group for each direction.

        rank 0  --- group (0, 1) -->  rank 1      activations
        rank 0  <-- group (1, 0) ---  rank 1      gradients
        all ranks, over Gloo                      control

    NCCL runs the operations of one communicator in the order in which they were enqueued, and may
    not complete a send before its receive is posted. So a receive posted early would block a send
    if two directions, or two peers, shared a communicator. Each direction of each pair therefore
    has a group of its own, which ``connect`` makes. Gloo has separate groups, too: if the default
    group is bound to a device, a group of all ranks would be a single communicator. Control uses
    Gloo on every device, as its few numbers are needed on the host.

    If several pipelines train replicas of one model, ranks are numbered within the pipeline (except
    in ``everybody``), and each pipeline has groups of its own. The groups are not taken from the
    mesh, because a rank that fails must be able to end the waits of its peers.

    Collective: all ranks of the default group must construct it, in the same order. With one rank
    there are no groups and no communication.

    Args:
        ranks: 1, or the size of the default process group; or the ranks of each pipeline.
        device: the device of the messages; chooses Gloo or a backend with queues, such as NCCL.
        timeout: seconds after which a wait fails.

    Attributes:
        layout: the ranks of each pipeline.
        ranks: the number of ranks in this pipeline.
        rank: this rank's number in its pipeline.
        activity: the present activity of this rank.
        everybody: control of all ranks, numbered as in the default process group.
    """

    def __init__(self, ranks: int | RankLayout, device: torch.device, timeout: float) -> None:
        self.layout = layout = ranks if isinstance(ranks, RankLayout) else RankLayout.alone(ranks)
        self._world_rank = dist.get_rank() if len(layout.ranks) > 1 else 0
        self.timeout = timeout
        self.activity = RankActivity()
        self._device = device
        self._backend = backend_for(device)
        self._background: Control | None = None
        self._controls: list[Control] = [self]
        self._connected: set[tuple[str, int, int]] = set()
        self._owned: list[dist.ProcessGroup] = []
        self._external: list[dist.ProcessGroup] = []
        self._lanes: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        super().__init__(
            layout.pipeline, self._world_rank, None, self._as_lost_peer, self._current_call
        )
        self._group = self.new_group(range(self.ranks), "gloo") if self.ranks > 1 else None
        self.everybody: Control = self
        self.most_numbers = 3 + 2 * len(layout.pipelines)
        if len(layout.pipelines) > 1:
            self.everybody = self.control_of_sets([layout.ranks])
            self.everybody.most_numbers = self.most_numbers

    def _current_call(self) -> str:
        return self.activity.phase

    def rank_name(self, peer: int) -> str:
        """The name of a rank of this pipeline in errors: its number in the default group."""
        return f"rank {self.members[peer]}"

    def connect(self, pairs: Collection[tuple[int, int]], lane: str = "") -> None:
        """Make the groups for messages between pairs of ranks.

        Collective over all ranks, which must pass the same pairs. Pairs that are connected already
        may be passed again.

        Args:
            pairs: pairs of ranks, the lower one first.
            lane: the name of another set of groups; "" for the groups of messages.

        Raises:
            LostPeerError: a rank did not take part.
        """
        new = sorted(pair for pair in {*pairs} if (lane, *pair) not in self._connected)
        self._connected.update((lane, *pair) for pair in new)
        with self.as_lost_peer(ALL_PEERS):
            for pair in new:
                for source, target in (pair, pair[::-1]):
                    if (group := self.new_group(pair)) is not None:
                        self._lanes[lane, source, target] = group
            if self._backend != "gloo":
                open_connections(self, new, self._device, lane)

    def between(self, source: int, target: int, lane: str = "") -> dist.ProcessGroup:
        """The group for messages from ``source`` to ``target``, after ``connect``."""
        group = self._lanes.get((lane, source, target))
        if group is None:
            raise PipelineError("this trainer was closed: build a new one")
        return group

    def isend(self, tensor: Tensor, peer: int, lane: str = "") -> dist.Work | None:
        """Start to send a contiguous tensor. Return the work to wait for; None if there is none."""
        # Like dist.isend, without its checks.
        group = self.between(self.rank, peer, lane)
        return group.send([_bytes(tensor)], self.number_in_pair(peer), _TAG)

    def irecv(self, buffer: Tensor, peer: int, lane: str = "") -> dist.Work | None:
        """Start to receive into ``buffer``. Return the work to wait for; None if there is none."""
        group = self.between(peer, self.rank, lane)
        return group.recv([_bytes(buffer)], self.number_in_pair(peer), _TAG)

    def number_in_pair(self, peer: int) -> int:
        """The rank of ``peer``, 0 or 1, within a group of ``peer`` and this rank."""
        return int(self.members[peer] > self._world_rank)

    def new_group(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Make a group of the ranks with these numbers in each pipeline; collective over all ranks.

        Returns:
            The group of this rank; None if this rank is not among ``ranks``.
        """
        pipelines = self.layout.pipelines
        sets = [[pipeline[rank] for rank in ranks] for pipeline in pipelines]
        return self.new_group_of_sets(sets, backend)

    def new_group_of_sets(
        self, sets: Sequence[Sequence[int]], backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Make one group for each set of ranks; collective over all ranks.

        Args:
            sets: disjoint sets of ranks, as the default process group numbers them.
            backend: the backend; None for the backend of the messages.

        Returns:
            The group of this rank; None if this rank is in no set.
        """
        groups = [(self._new(ranks, backend), ranks) for ranks in sets]
        return next((group for group, ranks in groups if self._world_rank in ranks), None)

    def control_of_sets(self, sets: Sequence[Sequence[int]]) -> Control:
        """Control of the ranks in the set that has this rank; collective over all ranks.

        Args:
            sets: as for ``new_group_of_sets``; one of them has this rank.
        """
        group = self.new_group_of_sets(sets, "gloo")
        ranks = next(ranks for ranks in sets if self._world_rank in ranks)
        control = Control(ranks, self._world_rank, group, self._as_lost_peer, self._current_call)
        self._controls.append(control)
        return control

    def root_and_group(self, sets: Sequence[Sequence[int]]) -> tuple[int, dist.ProcessGroup | None]:
        """Return (first rank, process group) of the set that has this rank; collective.

        For a rank in no set, the first rank is this rank and the group is None. The group is also
        None if the sets have one rank each.
        """
        first = next((ranks[0] for ranks in sets if self._world_rank in ranks), self._world_rank)
        return first, self.new_group_of_sets(sets) if len(sets[0]) > 1 else None

    def background_control(self) -> Control:
        """Control of all ranks over a second group, for a thread that runs beside the steps.

        Only one task may use this control at a time. Collective over all ranks at the first call.
        """
        if self._background is None:
            ranks = self.everybody.members
            group = self._new(ranks, "gloo") if len(ranks) > 1 else None
            # The watch reports the waits of the training thread only.
            unwatched = partial(as_lost_peer, contextlib.nullcontext, self.timeout)
            self._background = Control(ranks, self._world_rank, group, unwatched)
            self._controls.append(self._background)
        return self._background

    def add_external_group(self, group: dist.ProcessGroup) -> None:
        """Add a group that another object owns. Whenever waits on this object's groups are ended,
        waits on the added group are ended, too.
        """
        if group not in self._external:
            self._external.append(group)

    def _new(self, members: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        limit, backend = timedelta(seconds=self.timeout), backend or self._backend
        # With device_id, NCCL makes the communicator here, and not at the first message.
        device = self._device if backend == "nccl" else None
        group = cast(
            "dist.ProcessGroup",
            dist.new_group(sorted(members), timeout=limit, backend=backend, device_id=device),
        )
        if self._world_rank in members:
            self._owned.append(group)
        return group

    def _as_lost_peer(self, peer: str) -> contextlib.AbstractContextManager[None]:
        """Return the context that turns a failed wait for ``peer`` into a LostPeerError."""
        return as_lost_peer(self.activity.during_wait, self.timeout, peer)

    def sever(self) -> None:
        """End all waits of this rank, and all waits of its peers for this rank; from any thread."""
        self._end_waits([*self._owned, *self._external])

    def close(self) -> None:
        """Release the groups, and end every wait on them at once, on this rank and its peers."""
        groups = self._release()
        # External groups, too: a collective that hangs there blocks the device.
        self._end_waits([*groups, *self._external] if dist.is_initialized() else [])
        for group in groups:
            if not _is_queued(group):
                dist.destroy_process_group(group)

    def _end_waits(self, groups: Iterable[dist.ProcessGroup]) -> None:
        queued = []
        for group in groups:
            # Another thread may destroy the groups meanwhile.
            with contextlib.suppress(RuntimeError, ValueError):
                if _is_queued(group):
                    queued.append(group)
                    continue
                for peer in dist.get_process_group_ranks(group):
                    if peer != self._world_rank:
                        disconnect(group, peer)
        with contextlib.suppress(RuntimeError, ValueError):
            abort_groups(queued)

    def destroy(self) -> None:
        """Destroy the groups after a run without errors.

        The connections are closed in this call. If the garbage collector closes them, a step of the
        next trainer may be delayed by a second (seen with eight ranks on two cores).
        """
        for group in self._release():
            dist.destroy_process_group(group)
        self._lanes.clear()
        for control in self._controls:
            control.drop_group()

    def _release(self) -> list[dist.ProcessGroup]:
        owned, self._owned = self._owned, []
        # If the default group was destroyed, these were destroyed with it.
        return owned if dist.is_initialized() else []


@contextlib.contextmanager
def as_lost_peer(
    during_wait: Callable[[], contextlib.AbstractContextManager[None]], timeout: float, peer: str
) -> Iterator[None]:
    """Context that raises a failed communication as a LostPeerError that names ``peer``.

    Args:
        during_wait: a context that marks the rank as waiting.
        timeout: seconds after which the backend fails a wait.
        peer: the awaited rank or ranks, as text.
    """
    started = time.perf_counter()
    try:
        with during_wait():
            yield
    except RuntimeError as error:
        raise lost_peer_error(peer, time.perf_counter() - started, timeout, error) from error


def _is_queued(group: dist.ProcessGroup) -> bool:
    """Whether the group's backend queues operations, as NCCL does. Only ``abort`` ends a wait on
    such a group.
    """
    return dist.get_backend(group) != "gloo"


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes. No backend supports complex numbers, and NCCL does not support 16-bit
    integers.
    """
    # A contiguous tensor of one element may have any stride; a view as bytes needs stride 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def disconnect(group: dist.ProcessGroup, peer: int) -> None:
    """End every wait on a Gloo group between this rank and ``peer``, on both ranks."""
    with contextlib.suppress(RuntimeError):
        work = dist.irecv(torch.empty(1, device="cpu"), src=peer, group=group, tag=_CLOSING_TAG)
        if work is not None:
            work.wait(_AT_ONCE)


def lost_peer_error(peer: str, waited: float, timeout: float, error: RuntimeError) -> LostPeerError:
    """The LostPeerError for a wait that failed with ``error`` after ``waited`` seconds."""
    if waited >= 0.99 * timeout:  # the backend measures by another clock
        duration = f"waited {waited:.3g} s for {peer}"
        return LostPeerError(f"{duration}: is it stuck, or waiting itself?", duration)
    # After the first sentence, Gloo adds guesses about the cause.
    reason = str(error).partition(". ")[0].partition("\n")[0]
    return LostPeerError(
        f"lost {peer} (was a process killed, or has it closed its trainer?): {reason}"
    )
