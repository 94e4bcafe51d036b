"""One mode of running for each shape of batch that comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from autosplit.errors import BatchError
from autosplit.pipeline.schedule.moves import has_moves
from autosplit.pipeline.schedule.routes import pairs_of, routes_of
from autosplit.pipeline.schedule.schedule import Schedule, with_sharding
from autosplit.pipeline.schedule.wiring import Feeds

from .executor import Executor, Finished, ForwardStage, Shards
from .groups import Groups
from .host_store import HostStore
from .moves import Moves
from .shapes import Batch, BatchSplitter, Negotiation, TensorMeta
from .stages import TrainableStage, compile_stages
from .transport import Transport


class Mode:
    """One rank's executor, static shapes and messages for repeated runs of ``schedule``.

    Args:
        name: tells the modes of one trainer apart.
        schedule: what to run.
        feeds: who feeds whom.
        groups: the trainer's process groups.
        check: raises if another rank has failed.
        device: where the stages run.
        finished: see ``Executor``.
        store: this rank's store on the host, where it offloads.
        shards: this rank's stages that are sharded: where the schedule does not say, they are
            gathered before their first action and freed behind their last.

    Attributes:
        place: what the rank is doing.
        schedule: what is run.
        feeds: who feeds whom.
        rank: this process's.
        messages: carries this rank's tensors to other stages.
        moves: carries out the schedule's moves; None where there are none.
    """

    def __init__(
        self,
        name: str,
        schedule: Schedule,
        feeds: Feeds,
        groups: Groups,
        check: Callable[[], None],
        device: torch.device,
        finished: Finished | None = None,
        store: HostStore | None = None,
        shards: Shards | None = None,
    ) -> None:
        self._shards = shards
        self.schedule = schedule
        self.feeds = feeds
        self.rank = groups.rank
        self._device = device
        self._finished = finished
        self._store = store
        self._last = schedule.stages - 1
        own = schedule.held(groups.rank)
        self.split = BatchSplitter(
            schedule.microbatches,
            device,
            inputs=feeds.from_batch(own),
            targets=self._last in own,
            names=() if feeds.wiring is None else feeds.wiring.names,
        )
        self.negotiation = Negotiation(name, groups, check)
        self._groups = groups
        self.place = groups.place
        self._loss_grad: Tensor | None = None
        self.messages = self._connect(schedule)
        self.executor: Executor | None = None
        self.moves: Moves | None = None
        self.stages: Mapping[int, TrainableStage] = MappingProxyType({})

    def compile(self) -> None:
        """Compile what the schedule runs of this rank's stages, and wait for the other ranks'.

        Raises:
            BackendError: a backend cannot compile a graph.
            LostPeerError: another rank failed or was not ready in time.
        """
        with self.place("compiling its stages"):
            compile_stages(self.stages, self.schedule)
        # A step's clock starts for all ranks together, of replicas of the pipeline too.
        self._groups.everybody.meet()

    def prepare(
        self, stages: Mapping[int, ForwardStage], loss_grad: Tensor | None = None
    ) -> Executor:
        """Set the executor of this mode, which runs ``stages``; collective over all ranks."""
        groups, shards, schedule = self._groups, self._shards, self.schedule
        groups.connect(pairs_of(schedule, self.feeds))
        if shards is not None:
            schedule = with_sharding(schedule, shards.stages)
        self.moves = None
        if has_moves(schedule):
            self.moves = Moves(stages, schedule, groups, self._device, self._store)
        self._loss_grad = loss_grad
        self.executor = Executor(
            stages,
            schedule,
            self.rank,
            self.messages,
            loss_grad=loss_grad,
            finished=self._finished,
            place=self.place,
            moves=self.moves,
            shards=shards,
        )
        return self.executor

    def reschedule(self, schedule: Schedule) -> None:
        """Go on with the stages that are there under another schedule of the same placement."""
        self.schedule = schedule
        self.messages = self._connect(schedule)
        if self.executor is not None:
            compile_stages(self.stages, schedule)
            self.prepare(self.stages, self._loss_grad)

    def _connect(self, schedule: Schedule) -> Transport:
        routes = routes_of(schedule, self.rank, self.feeds)
        return Transport(routes, self._groups, self.negotiation, device=self._device)

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the loss; waits until the last stage's rank has said."""
        return self.negotiation.learn(self._last)[0].dtype

    def announce_loss(self, losses: Mapping[int, Tensor]) -> None:
        """Tell the other ranks of the loss, unless they know; for the last stage's rank."""
        for loss in losses.values():
            if self._last not in self.negotiation.known:
                self.negotiation.publish(self._last, [TensorMeta.of(loss)])


_KEPT = 64  # modes: each has buffers of its own for messages


class Modes:
    """Finds the mode that fits a batch, on every rank the same.

    With one shape nothing needs to be said. Else the rank of the first stage that takes
    any of the batch tells the others its shape.

    Args:
        static: whether all batches are of one shape; else they may have any number, of which those
            that were used last are kept.
        groups: the trainer's process groups.
        source: the rank of the first stage that takes inputs of the batch; passes all of them.
        make: makes the mode of a name that tells it apart.
    """

    def __init__(
        self, static: bool, groups: Groups, source: int, make: Callable[[str], Mode]
    ) -> None:
        self._static = static
        self._groups = groups
        self._source = source
        self._make = make
        self._known: dict[str, Mode] = {}

    def of(self, batch: Batch | None) -> Mode:
        """The mode for ``batch``; collective unless there is only one.

        Raises:
            BatchError: replicas were given different shapes.
            LostPeerError: the first stage's rank did not say.
        """
        shape = ""
        if not self._static:
            own = _shape(batch) if self._groups.rank == self._source else None
            alone = self._groups.everybody.ranks == 1
            shape = own or "" if alone else self._agreed(own)
        if shape in self._known:
            self._known[shape] = self._known.pop(shape)  # used last
        else:
            if len(self._known) == _KEPT:  # all ranks drop the same
                del self._known[next(iter(self._known))]
            self._known[shape] = self._make(shape)
        return self._known[shape]

    def _agreed(self, own: str | None) -> str:
        """The shape that the first stage's rank says, and that of every replica of the pipeline."""
        layout = self._groups.layout
        if len(layout.pipelines) == 1:
            return self._groups.announce(own, self._source)
        heard = self._groups.everybody.gather(own)
        sources = layout.columns[self._source]
        first, shape = sources[0], heard[sources[0]] or ""
        for rank in sources:
            if heard[rank] != shape:
                raise BatchError(
                    f"the replicas were given batches of different shapes: the inputs are {shape} "
                    f"on rank {first} and {heard[rank]} on rank {rank}; give each replica as many "
                    "samples of one shape, as a DistributedSampler and a DataLoader with "
                    "drop_last=True do"
                )
        return shape

    def drop_unbuilt(self) -> None:
        """Forget the modes that have run nothing, as if their batches had not come."""
        self._known = {
            shape: mode for shape, mode in self._known.items() if mode.executor is not None
        }

    def reschedule(self, schedule: Schedule, make: Callable[[str], Mode]) -> None:
        """Go on under another schedule, also with shapes to come, which ``make`` makes."""
        self._make = make
        for mode in self._known.values():
            mode.reschedule(schedule)


def _shape(batch: Batch | None) -> str:
    part = batch[0] if isinstance(batch, tuple | list) and batch else None
    if isinstance(part, Mapping):
        part = [part[name] for name in sorted(part)]
    tensors = part if isinstance(part, tuple | list) else [part]
    shapes = [f"{each.dtype}{[*each.shape]}" for each in tensors if isinstance(each, Tensor)]
    return ", ".join(shapes).replace("torch.", "")
