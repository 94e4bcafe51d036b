"""One mode of running a pipeline: training or evaluating, each with its own static shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from autosplit.pipeline.engine.memory.host_store import HostStore
from autosplit.pipeline.engine.memory.moves import MicrobatchMoves
from autosplit.pipeline.engine.memory.partner_link import (
    PartnerLink,
    connect_partners,
    partner_pairs,
)
from autosplit.pipeline.engine.memory.transferred_bytes import TransferredBytes
from autosplit.pipeline.engine.messages.process_groups import Groups
from autosplit.pipeline.engine.messages.shape_negotiation import Negotiation, TensorMeta
from autosplit.pipeline.engine.messages.transport import Transport
from autosplit.pipeline.schedule.moves import has_moves
from autosplit.pipeline.schedule.routes import pairs_of, routes_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.sharding import with_sharding
from autosplit.pipeline.schedule.wiring import Feeds

from .action_order import Order, as_scheduled
from .executor import Executor, ForwardStage
from .microbatch import BatchSplitter
from .stage_assembly import TrainableStage, compile_stages
from .stage_protocols import Shards
from .weight_completions import Finished


class Mode:
    """One rank's executor, static shapes and messages for repeated runs of ``schedule``.

    Args:
        name: tells the modes of one trainer apart.
        schedule: what to run.
        feeds: who feeds whom.
        groups: the trainer's process groups.
        check: raises if another rank has failed.
        device: where the stages run.
        order: in which order a rank takes up its actions.
        finished: see ``Executor``.
        store: this rank's store on the host, where it offloads.
        shards: this rank's stages that are sharded: where the schedule does not say, they are
            gathered before their first action and freed behind their last.

    Attributes:
        place: what the rank is doing.
        schedule: what is run.
        feeds: who feeds whom.
        rank: this process's.
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
        order: Order = as_scheduled,
        finished: Finished | None = None,
        store: HostStore | None = None,
        shards: Shards | None = None,
    ) -> None:
        self._shards = shards
        self.schedule = schedule
        self.feeds = feeds
        self.rank = groups.rank
        self._device = device
        self._order = order
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
        self._transport = self._connect(schedule)
        self.executor: Executor | None = None
        self.moves: MicrobatchMoves | None = None
        self.stages: Mapping[int, TrainableStage] = MappingProxyType({})

    def compile(self) -> None:
        """Compile what the schedule runs of this rank's stages, and wait for the other ranks'.

        Raises:
            BackendError: a backend cannot compile a graph.
            LostPeerError: another rank failed or was not ready in time.
        """
        with self.place("compiling its stages"):
            compile_stages(self.stages, self.schedule)
        self.negotiation.start()

    def prepare(
        self, stages: Mapping[int, ForwardStage], loss_grad: Tensor | None = None
    ) -> Executor:
        """Set the executor of this mode, which runs ``stages``; collective over all ranks."""
        self._groups.connect(pairs_of(self.schedule, self.feeds))
        self._loss_grad = loss_grad
        self.moves = self._moves(stages)
        self.executor = Executor(
            stages,
            self._gathering(),
            self.rank,
            self._transport,
            loss_grad=loss_grad,
            order=self._order,
            finished=self._finished,
            place=self.place,
            moves=self.moves,
            shards=self._shards,
        )
        return self.executor

    def _gathering(self) -> Schedule:
        """The schedule with UNSHARD and RESHARD of this rank's sharded stages."""
        if self._shards is None:
            return self.schedule
        return with_sharding(self.schedule, self._shards.stages)

    def _moves(self, stages: Mapping[int, ForwardStage]) -> MicrobatchMoves | None:
        """What carries out the schedule's moves; collective over all ranks."""
        schedule, groups = self._gathering(), self._groups
        if not has_moves(schedule):
            return None
        pairs = partner_pairs(schedule)
        connect_partners(groups, pairs)
        mine = next((pair for pair in pairs if self.rank in pair), None)
        partner, transferred = None, TransferredBytes()
        if mine is not None:
            (other,) = {*mine} - {self.rank}
            partner = PartnerLink(groups, other, self._device, transferred)
        return MicrobatchMoves(
            stages,
            schedule,
            self.rank,
            self._device,
            store=self._store,
            partner=partner,
            timeout=groups.timeout,
            place=self.place,
            transferred=transferred,
        )

    def reschedule(self, schedule: Schedule) -> None:
        """Go on with the stages that are there under another schedule of the same placement."""
        self.schedule = schedule
        self._transport = self._connect(schedule)
        if self.executor is not None:
            compile_stages(self.stages, schedule)
            self.prepare(self.stages, self._loss_grad)

    def _connect(self, schedule: Schedule) -> Transport:
        return Transport(
            routes_of(schedule, self.rank, self.feeds),
            self._groups,
            self.negotiation,
            device=self._device,
            watch=self._order is not as_scheduled,
        )

    @property
    def messages(self) -> Transport:
        """What carries this rank's tensors to other stages."""
        return self._transport

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the loss; waits until the last stage's rank has said."""
        return self.negotiation.learn(self._last)[0].dtype

    def announce_loss(self, losses: Mapping[int, Tensor]) -> None:
        """Tell the other ranks of the loss, unless they know; for the last stage's rank."""
        for loss in losses.values():
            if self._last not in self.negotiation.known:
                self.negotiation.publish(self._last, [TensorMeta.of(loss)])
