"""The process groups that one trainer owns, and how to end every wait on them.

Gloo as it is (torch 2.13, seen running): neither ``abort()`` nor ``destroy_process_group`` ends
a wait of a peer while anything still refers to the group, so a rank that failed but lives on
would leave its peers waiting until the timeout. A receive that times out, however, closes its
connection at once, on both ends and for everything else under way on it. ``close`` uses that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import RankLayout

from .control import OTHERS, Control, Sum
from .first_error import KeyValueStore, LostPeerError, RankActivity

if TYPE_CHECKING:
    from .first_error import Guard


def greet(link: PointToPoint, pairs: Iterable[tuple[int, int]], device: torch.device) -> None:
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
            work = link.isend(tensor, target) if sends else link.irecv(tensor, source)
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


class Abortable(Protocol):
    """What ``abort`` ends."""

    def abort(self) -> None: ...


def abort(groups: Sequence[Abortable]) -> None:
    """End what is under way over some NCCL groups, all at once: ending one waits for the device,
    on which a message of another hangs until that is ended.
    """
    if groups:
        with ThreadPoolExecutor(len(groups), "autosplit-abort") as pool:
            for each in [pool.submit(group.abort) for group in groups]:
                each.result()


# Tags keep the closing receives apart from real messages: a message that met a buffer of another
# size would end the whole process.
_TAG, _CLOSING_TAG = 0, 2**31 - 1
_AT_ONCE = timedelta(milliseconds=1)


class PointToPoint(Protocol):
    """Messages between two ranks, in the order in which each end starts them.

    A send may not complete before the other end has started to receive it.
    """

    rank: int
    timeout: float

    def isend(self, tensor: Tensor, peer: int) -> dist.Work | None:
        """Start sending a contiguous tensor; None if there is nothing to wait for."""
        ...

    def irecv(self, buffer: Tensor, peer: int) -> dist.Work | None:
        """Start filling ``buffer``; None if there is nothing to wait for."""
        ...

    def named(self, peer: int) -> str:
        """What the peer is called in errors."""
        ...


class ShardGroups(NamedTuple):
    """What connects ranks whose stages are sharded.

    Attributes:
        gathering: the ranks that have the shards of the same parameters, for these.
        reducing: the same ranks, for gradients: which of two messages starts first, where both are
            under way, is not the same on all ranks.
        copying: the ranks that have the same shards; None: no other does.
    """

    gathering: dist.ProcessGroup
    reducing: dist.ProcessGroup
    copying: dist.ProcessGroup | None


class Groups:
    """Groups over all ranks for control, and one for each direction of travel.

    NCCL runs the operations of one communicator in the order in which they were enqueued and may
    not complete a send before its receive is posted, so a receive posted early would hold up a
    send if the two directions shared a communicator, or two peers. So each direction of each pair
    has a group of its own, which ``connect`` makes: one of all ranks would be a single
    communicator where the default group is bound to a device. Over Gloo, a group of all ranks
    carries messages to higher ranks, ``up``, and another to lower ones, ``down``. ``control`` is
    Gloo on every device: its few numbers are needed on the host.

    Where several pipelines train replicas of one model, ranks are numbered within the pipeline
    (but for ``everybody``), and each pipeline has groups of its own. They are made here rather than
    taken from a mesh: whoever fails must be able to end the waits of others.

    Creating one is collective: every rank of the default group must do so, in the same order.
    With one rank there are no groups and nothing here communicates.

    Args:
        ranks: 1, or the size of the default process group; or which ranks are in which pipeline.
        device: where the messages live; decides between Gloo and NCCL.
        timeout: seconds after which a wait fails.

    Attributes:
        layout: which ranks are in which pipeline.
        ranks: how many this pipeline has.
        rank: this rank within it.
        place: knows when this rank waits for others.
        pipeline: control of this pipeline's ranks.
        everybody: control of all ranks, numbered as in the default process group.
    """

    def __init__(self, ranks: int | RankLayout, device: torch.device, timeout: float) -> None:
        layout = ranks if isinstance(ranks, RankLayout) else RankLayout.alone(ranks)
        self.layout = layout
        self.ranks = len(layout.pipeline)
        grouped = len(layout.ranks) > 1
        self._own = dist.get_rank() if grouped else 0
        self.rank = layout.pipeline.index(self._own)
        self.timeout = timeout
        self.place = RankActivity()
        self._device = device
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._pairwise = self._backend == "nccl"
        self._beside: Control | None = None
        self._connected: dict[str, set[tuple[int, int]]] = {}
        self._owned: list[dist.ProcessGroup] = []
        self._lent: list[dist.ProcessGroup] = []
        self._lanes: dict[str, dist.ProcessGroup] = {}
        # The members of a group are in the order of their numbers in the default one.
        self._places = [sorted(layout.pipeline).index(each) for each in layout.pipeline]
        lanes = () if self._pairwise else ("up", "down")
        control = self._new_each(range(self.ranks), "gloo") if self.ranks > 1 else None
        self.pipeline = Control(layout.pipeline, self._own, control, self.losing)
        self.everybody = self.pipeline
        if len(layout.pipelines) > 1:
            world = self._new(layout.ranks, "gloo")
            self.everybody = Control(layout.ranks, self._own, world, self.losing)
        for lane in lanes if self.ranks > 1 else ():
            group = self._new_each(range(self.ranks), "gloo")
            if group is not None:
                self._lanes[lane] = group

    @property
    def store(self) -> KeyValueStore:
        """A key-value store that the pipeline's ranks share and nobody else writes to."""
        return self.pipeline.store

    def member(self, rank: int) -> int:
        """A rank of this pipeline as the default process group numbers it."""
        return self.layout.pipeline[rank]

    def named(self, peer: int) -> str:
        """What a rank of this pipeline is called in errors."""
        return f"rank {self.member(peer)}"

    def connect(self, pairs: Collection[tuple[int, int]], lanes: str = "") -> None:
        """Make ready for messages between these pairs of ranks, the lower one first.

        Collective over all ranks, which all name the same pairs; they may name some again. Over
        Gloo all ranks are connected from the start, but for lanes of their own.

        Args:
            pairs: the ranks.
            lanes: a name for lanes besides those of ``isend`` and ``irecv``, see ``between``.

        Raises:
            LostPeerError: some rank did not take part.
        """
        connected = self._connected.setdefault(lanes, set())
        new = sorted({*pairs} - connected) if self._pairwise or lanes else []
        connected.update(new)
        with self.losing(OTHERS):
            for pair in new:
                for source, target in (pair, pair[::-1]):
                    group = self._new_each(pair, self._backend)
                    if group is not None:
                        self._lanes[_lane_of(source, target, lanes)] = group
            if not lanes:
                greet(self, new, self._device)

    def between(self, source: int, target: int, lanes: str) -> dist.ProcessGroup:
        """The group of a pair's own for what goes one way, after ``connect``."""
        return self._lane(_lane_of(source, target, lanes))

    def isend(self, tensor: Tensor, peer: int) -> dist.Work | None:
        """Start sending a contiguous tensor; None if there is nothing to wait for."""
        # As dist.isend does, without its checks.
        lane, number = self._towards(self.rank, peer), self._number(peer)
        return lane.send([_bytes(tensor)], number, _TAG)

    def irecv(self, buffer: Tensor, peer: int) -> dist.Work | None:
        """Start filling ``buffer``; None if there is nothing to wait for."""
        lane, number = self._towards(peer, self.rank), self._number(peer)
        return lane.recv([_bytes(buffer)], number, _TAG)

    def number_in_pair(self, peer: int) -> int:
        """A rank's number in a group of it and this rank."""
        return int(self.member(peer) > self._own)

    def _number(self, peer: int) -> int:
        """A rank's number in the group that messages to and from it go over."""
        return self.number_in_pair(peer) if self._pairwise else self._places[peer]

    def _towards(self, source: int, target: int) -> dist.ProcessGroup:
        """The group for messages from rank ``source`` to rank ``target``."""
        if self._pairwise:
            return self._lane(_lane_of(source, target))
        return self._lane("up" if source < target else "down")

    def _lane(self, name: str) -> dist.ProcessGroup:
        group = self._lanes.get(name)
        if group is None:
            raise PipelineError("this trainer was closed: build a new one")
        return group

    def among(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A new group of some ranks of this pipeline; collective over all ranks, of all pipelines.
        None if this rank is not in.
        """
        return self._new_each(ranks, self._backend)

    def replicas(self) -> dist.ProcessGroup | None:
        """A new group of the ranks that hold replicas of this rank's stages; collective over all
        ranks. None where there is one replica.
        """
        if self.layout.replicas == 1:
            return None
        return self._own_of(self.layout.copies)

    def tensor_parts(self) -> dist.ProcessGroup | None:
        """A new group of the ranks that share this rank's tensors; collective over all ranks. None
        where nobody does.
        """
        if self.layout.tensor_ranks == 1:
            return None
        return self._own_of(self.layout.tensor_groups)

    def shards(self) -> ShardGroups:
        """New groups of the ranks that have shards of this rank's stages, and of those that have
        the same shards; collective over all ranks.
        """
        sets = self.layout.shard_groups
        gathering, reducing = self._own_of(sets), self._own_of(sets)
        return ShardGroups(gathering, reducing, self.replicas())

    def peers(self) -> dist.ProcessGroup | None:
        """A new group of the ranks that run this rank's stages on other shares of the batch;
        collective over all ranks. None where no other does.
        """
        if self.layout.shares == 1:
            return None
        return self._own_of(self.layout.peers)

    def beside(self) -> Control:
        """All ranks over a group of its own, for what a thread does beside the steps, one such
        thing at a time; collective over all ranks the first time.
        """
        if self._beside is None:
            ranks = self.everybody.members
            group = self._new(ranks, "gloo") if len(ranks) > 1 else None
            self._beside = Control(ranks, self._own, group, self._losing_beside)
        return self._beside

    @contextlib.contextmanager
    def _losing_beside(self, what: str) -> Iterator[None]:
        """As ``losing``, in another thread than that whose waits are watched."""
        started = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise lost(what, time.perf_counter() - started, self.timeout, error) from error

    def _own_of(self, sets: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """A new group of each set of ranks, of which this rank is in one: that one."""
        groups = [self._new(ranks, self._backend) for ranks in sets]
        return next(group for group, ranks in zip(groups, sets, strict=True) if self._own in ranks)

    def watch_lent(self, group: dist.ProcessGroup) -> None:
        """End the waits on a group of somebody else's, too, where this ends its own."""
        if group not in self._lent:
            self._lent.append(group)

    def _new_each(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        """A new group of these ranks in each pipeline: that of this one, if this rank is in it."""
        groups = [
            self._new([pipeline[rank] for rank in ranks], backend)
            for pipeline in self.layout.pipelines
        ]
        return groups[self.layout.own] if self.rank in ranks else None

    def _new(self, members: Sequence[int], backend: str) -> dist.ProcessGroup:
        limit = timedelta(seconds=self.timeout)
        group = cast(
            "dist.ProcessGroup", dist.new_group(sorted(members), timeout=limit, backend=backend)
        )
        if self._own in members:
            self._owned.append(group)
        return group

    def meet(self) -> None:
        """Wait until every rank of the pipeline is here; see ``Control``."""
        self.pipeline.meet()

    def start_sum(self, tensor: Tensor) -> Sum:
        """Start to sum over the ranks of the pipeline; see ``Control``."""
        return self.pipeline.start_sum(tensor)

    def announce(self, value: str | None, source: int) -> str:
        """``value`` of a rank of the pipeline, on all of them; see ``Control``."""
        return self.pipeline.announce(value, source)

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank of the pipeline, by rank; see ``Control``."""
        return self.pipeline.gather(value)

    @contextlib.contextmanager
    def losing(self, what: str) -> Iterator[None]:
        """Wait for ``what``; a failed communication becomes a LostPeerError that says so."""
        started = time.perf_counter()
        try:
            with self.place.waits():
                yield
        except RuntimeError as error:
            raise lost(what, time.perf_counter() - started, self.timeout, error) from error

    def cut(self) -> None:
        """End every wait of this rank over Gloo, and those of its peers for it; in any thread."""
        for group in [*self._owned, *self._lent]:
            # The groups may be let go of meanwhile.
            with contextlib.suppress(RuntimeError, ValueError):
                self._disconnect(group)

    def close(self) -> None:
        """Let go of the groups and end every wait on them at once, here and on the peers."""
        groups = self._release()
        for group in groups:
            self._disconnect(group)
        devices = [group for group in groups if dist.get_backend(group) == "nccl"]
        for group in groups:
            if group not in devices:
                dist.destroy_process_group(group)
        abort(devices)

    def _disconnect(self, group: dist.ProcessGroup) -> None:
        if dist.get_backend(group) != "nccl":
            for peer in dist.get_process_group_ranks(group):
                if peer != self._own:
                    disconnect(group, peer)

    def destroy(self) -> None:
        """Let go of the groups after a run that went well.

        Their connections end here. Left to the garbage collector, which comes when it likes, they
        have held up a step of the next trainer for a second (eight ranks on two cores).
        """
        for group in self._release():
            dist.destroy_process_group(group)
        self._lanes.clear()
        self.pipeline.close()
        self.everybody.close()
        if self._beside is not None:
            self._beside.close()

    def _release(self) -> list[dist.ProcessGroup]:
        owned, self._owned = self._owned, []
        # Destroying the default group has destroyed these as well.
        return owned if dist.is_initialized() else []


def _lane_of(source: int, target: int, lanes: str = "") -> str:
    return f"{lanes} {source} to {target}".lstrip()


def _bytes(tensor: Tensor) -> Tensor:
    """Not every backend knows every dtype: none has complex numbers, NCCL no short integers."""
    return tensor.view(-1).view(torch.uint8)


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
