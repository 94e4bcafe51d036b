"""Tensors between stages, over point-to-point messages or by hand on one rank.

Shapes are agreed on before training, so a message is nothing but data; in evaluation the first that
crosses a boundary says them. Receives are posted ahead; sends are
not waited for, and what they send is kept until a later message proves that it arrived (see
``routes``) or the step ends. What several stages take is sent to each.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.boundaries import Boundaries, TensorMeta
from autosplit.pipeline.schedule.routes import (
    Routes,
    StageDataflow,
    StageMessage,
    outgoing_messages,
)
from autosplit.pipeline.schedule.schedule import Action, ActionKind
from autosplit.ranks.first_error import LostPeerError
from autosplit.ranks.groups import Groups, lost_peer_error

Receive = Callable[[], "list[Tensor | None]"]
Send = Callable[[Sequence[Any]], None]


class _Transfer(NamedTuple):
    """Tensors being sent or filled. They live here until every operation on them is complete.

    Attributes:
        message: which.
        does: what the peer does with it, in words.
        tensors: None for a gradient that is not.
        works: under way.
    """

    message: StageMessage
    does: str
    tensors: list[Tensor | None]
    works: list[dist.Work]


class Mailbox:
    """The messages of one step between this rank and one peer: receives are posted in its order and
    taken in this rank's.

    Nothing here asks whether a send is complete: Gloo only knows after a wait, and a wait that
    times out closes the connection. So waits happen where they are known to return at once.

    What is received has memory of its own, which lives as long as somebody holds a tensor in it:
    the stage that took it until its backward, a user's list, a message that passes it on. On CUDA
    it is made under the stream that computes, behind all that this stream was given before, so that
    a receive cannot overtake a kernel that still reads what lay there.

    Args:
        link: carries the messages.
        peer: the other rank.
        routes: what it sends, in its order, and which tensors those are.
        boundaries: what crosses.
        device: where tensors are received.
    """

    def __init__(
        self,
        link: Groups,
        peer: int,
        routes: Routes,
        boundaries: Boundaries,
        device: torch.device,
    ) -> None:
        self._link, self._peer, self._device = link, peer, device
        self._boundaries, self._dataflow = boundaries, routes.dataflow
        self._told = {*boundaries.known}
        self._messages = routes.receives.get(peer, ())
        self._posted = self._retired = 0
        self._coming: dict[StageMessage, _Transfer] = {}
        self._sent: deque[_Transfer] = deque()

    @property
    def tensors(self) -> Iterator[Tensor]:
        """What is posted and was not taken, and what is sent and may be under way."""
        for transfer in (*self._coming.values(), *self._sent):
            yield from (each for each in transfer.tensors if each is not None)

    def begin(self) -> None:
        """Start a step."""
        self._posted = self._retired = 0

    def put(self, message: StageMessage, tensors: Sequence[Tensor | None]) -> None:
        """Start sending those that there are."""
        transfer = _Transfer(message, "needs", [], [])
        self._sent.append(transfer)
        if message.boundary not in self._told:
            self._told.add(message.boundary)
            text = bytearray(pickle.dumps(self._boundaries.known[message.boundary]))
            told = torch.frombuffer(text.ljust(_TOLD), dtype=torch.uint8)
            self._start(transfer, self._link.isend, told.to(self._device))
        for tensor in tensors:
            if tensor is not None:
                self._start(transfer, self._link.isend, tensor.contiguous())

    def retire(self, count: int) -> None:
        """Let go of the first ``count`` messages of this step; waits for any still under way."""
        while self._retired < count:
            self._retired += 1
            self._wait(self._sent.popleft())

    def finish(self) -> None:
        """End a step: wait for everything under way."""
        self.retire(self._retired + len(self._sent))

    def post_next(self) -> None:
        """Post one receive more, if its shapes are known."""
        left = self._posted < len(self._messages)
        if left and self._messages[self._posted].boundary in self._boundaries.known:
            self._post()

    def take(self, message: StageMessage, place: int, acked_sends: int) -> list[Tensor | None]:
        """Wait for a message; its tensors.

        Args:
            message: which.
            place: in the order of the peer.
            acked_sends: how many of the messages sent to it have arrived if anything travelled.
        """
        while self._posted <= place:
            self._learn(self._messages[self._posted])
            self._post()
        transfer = self._coming.pop(message)
        self._wait(transfer)
        if transfer.works:
            self.retire(acked_sends)
        return transfer.tensors

    def _learn(self, message: StageMessage) -> None:
        """Wait for the shapes at a boundary, ahead of the first that crosses it."""
        known, boundary = self._boundaries.known, message.boundary
        if boundary not in known:
            told = torch.empty(_TOLD, dtype=torch.uint8, device=self._device)
            transfer = _Transfer(message, "makes", [], [])
            self._start(transfer, self._link.irecv, told)
            self._wait(transfer)
            known[boundary] = pickle.loads(bytes(told.tolist()))

    def _post(self) -> None:
        message = self._messages[self._posted]
        self._posted += 1
        transfer = self._coming[message] = _Transfer(message, "makes", [], [])
        for meta in self._boundaries.crossing(message, self._dataflow):
            if meta is None:
                transfer.tensors.append(None)
            else:
                made = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
                self._start(transfer, self._link.irecv, made)

    def _start(
        self, transfer: _Transfer, start: Callable[[Tensor, int], dist.Work | None], tensor: Tensor
    ) -> None:
        transfer.tensors.append(tensor)
        begun = perf_counter()
        try:
            work = start(tensor, self._peer)
        except RuntimeError as error:
            raise self._lost(transfer, begun, error) from error
        if work is not None:
            transfer.works.append(work)

    def _wait(self, transfer: _Transfer) -> None:
        """Wait until every operation is complete."""
        begun = perf_counter()
        try:
            for work in transfer.works:
                work.wait()
        except RuntimeError as error:
            raise self._lost(transfer, begun, error) from error

    def _lost(self, transfer: _Transfer, begun: float, error: RuntimeError) -> LostPeerError:
        what = f"{self._link.rank_name(self._peer)}, which {transfer.does} {transfer.message}"
        return lost_peer_error(what, perf_counter() - begun, self._link.timeout, error)


_TOLD = 2**16
"""Bytes that say what crosses a boundary: of some two thousand tensors."""


class Transport:
    """One rank's messages under one schedule; the same calls every step.

    Args:
        routes: what travels where.
        link: carries the messages.
        boundaries: what crosses; those that are not known yet are by the first tensors that do.
        device: where received tensors are made.
        posts: by action, the peers from which the next receives are posted before it, as
            ``recv_posting_order`` returns them. Over NCCL, a posted receive is a kernel that waits
            on the device, and may delay kernels that are launched after it.

    Attributes:
        dataflow: the dataflow between stages.
    """

    def __init__(
        self,
        routes: Routes,
        link: Groups,
        boundaries: Boundaries,
        *,
        device: torch.device,
        posts: Mapping[Action, Sequence[int]],
    ) -> None:
        self._posts, self._boundaries, self._device = posts, boundaries, device
        self._routes, self.dataflow = routes, routes.dataflow
        self._boxes = {
            peer: Mailbox(link, peer, routes, boundaries, device)
            for peer in {**routes.sends, **routes.receives}
        }
        self._target = {each: peer for peer, messages in routes.sends.items() for each in messages}
        self._source = {
            each: peer for peer, messages in routes.receives.items() for each in messages
        }
        self._here: dict[StageMessage, list[Tensor | None]] = {}

    def begin(self) -> None:
        """Start a step."""
        for box in self._boxes.values():
            box.begin()

    def posts(self, action: Action) -> list[Callable[[], None]]:
        """The calls that post receives before an action."""
        return [self._boxes[peer].post_next for peer in self._posts.get(action, ())]

    def finish(self) -> None:
        """End a step: wait until everything sent has arrived.

        Raises:
            LostPeerError: a peer died or did not take a message in time.
        """
        for box in self._boxes.values():
            box.finish()

    @property
    def tensors(self) -> list[Tensor]:
        """What messages hold: what comes, what goes, results on their way to stages here."""
        here = [each for part in self._here.values() for each in part if each is not None]
        return [*here, *(tensor for box in self._boxes.values() for tensor in box.tensors)]

    def sender(self, result: Action) -> Send | None:
        """The call that hands ``result`` (an F's or I's, named by its action) to other stages; None
        where no stage takes it.

        It takes one tensor per output of an F, one gradient per input of an I. Of gradients those
        that were agreed on travel, one that is missing in this microbatch as zeros. It raises
        PipelineError, before sending anything, if a tensor is not what was agreed on.
        """
        messages = outgoing_messages(result, self.dataflow)
        if result.kind is ActionKind.FORWARD:
            return self._output_sender(result, messages)
        sends = [self._gradient_sender(message) for message in messages]
        if len(sends) <= 1:
            return sends[0] if sends else None

        def send(gradients: Sequence[Tensor | None]) -> None:
            for each in sends:
                each(gradients)

        return send

    def receiver(self, message: StageMessage) -> Receive:
        """The call that waits for ``message`` and returns a fresh list of its tensors.

        Gradients come with one entry per output that went the other way, None where it needs none.
        It raises LostPeerError if the sender died or did not send in time.
        """
        if message not in self._source:
            return partial(self._here.pop, message)
        peer, routes = self._source[message], self._routes
        place = routes.receives[peer].index(message)
        return partial(self._boxes[peer].take, message, place, routes.acked_sends[message])

    def _output_sender(self, result: Action, messages: Sequence[StageMessage]) -> Send:
        dataflow = self.dataflow
        puts = [
            (self._put(each), dataflow.positions(each.boundary, each.taker)) for each in messages
        ]
        known, stage = self._boundaries.known, result.stage

        def send(tensors: Sequence[Tensor]) -> None:
            if stage not in known:  # the first outputs are what later ones are held to
                dataflow.check_outputs(stage, len(tensors))
                known[stage] = tuple(map(TensorMeta.of, tensors))
            agreed = known[stage]
            if len(tensors) != len(agreed):
                raise PipelineError(
                    f"stage {stage} put out {len(tensors)} tensors for microbatch "
                    f"{result.microbatch}, but {len(agreed)} were agreed on when the pipeline was "
                    "built; a stage must put out the same tensors every time"
                )
            for place, (tensor, meta) in enumerate(zip(tensors, agreed, strict=True)):
                if tensor.shape != meta.shape or tensor.dtype is not meta.dtype:
                    raise _unlike(f"output {place} of stage {stage}", result, tensor, meta)
            for put, positions in puts:
                ready = tensors if positions is None else [tensors[each] for each in positions]
                put([*ready])

        return send

    def _gradient_sender(self, message: StageMessage) -> Send:
        put, result = self._put(message), message.result
        choose = gradients_for(message.boundary, message.taker, self.dataflow)
        agreed = self._boundaries.crossing(message, self.dataflow)

        def send(gradients: Sequence[Tensor | None]) -> None:
            if choose is not None:
                gradients = choose(gradients)
            if len(gradients) < len(agreed):
                raise PipelineError(
                    f"stage {result.stage} gave {len(gradients)} input gradients for microbatch "
                    f"{result.microbatch}; expected one for each of its {len(agreed)} inputs"
                )
            ready: list[Tensor | None] = []
            # The last stage's targets come after the boundary's tensors and take no part.
            for place, (tensor, meta) in enumerate(zip(gradients, agreed, strict=False)):
                if meta is None:
                    if tensor is not None:
                        self._refuse_unexpected(message, place)
                        tensor = None
                elif tensor is None:
                    tensor = torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)
                elif tensor.shape != meta.shape or tensor.dtype is not meta.dtype:
                    raise _unlike(self._gradient_name(message, place), result, tensor, meta)
                ready.append(tensor)
            put(ready)

        return send

    def _put(self, message: StageMessage) -> Send:
        if message not in self._target:
            return partial(self._here.__setitem__, message)
        return partial(self._boxes[self._target[message]].put, message)

    def _refuse_unexpected(self, message: StageMessage, place: int) -> None:
        """Refuse a gradient that the other stage does not wait for, though it could use it."""
        boundary, taker = message.boundary, message.taker
        metas = self.dataflow.select(self._boundaries.known[boundary], boundary, taker)
        if metas[place].requires_grad:
            raise PipelineError(
                f"there is a {self._gradient_name(message, place)} in microbatch "
                f"{message.result.microbatch}, but there was none when the pipeline was built: "
                f"something that the forward of stage {taker} reads has changed, so that the loss "
                "depends on more inputs. Build a new trainer"
            )

    def _gradient_name(self, message: StageMessage, place: int) -> str:
        positions = self.dataflow.positions(message.boundary, message.taker)
        if positions is None:
            return f"gradient of input {place} of stage {message.taker}"
        output = f"output {positions[place]} of stage {message.boundary}"
        return f"gradient that stage {message.taker} gives {output}"


def _unlike(name: str, result: Action, tensor: Tensor, meta: TensorMeta) -> PipelineError:
    return PipelineError(
        f"{name} in microbatch {result.microbatch} is {TensorMeta.of(tensor)}, but {meta} was "
        "agreed on when the pipeline was built: shapes between stages are static; give every "
        "microbatch the same shape, or build a new trainer"
    )


# --- a stage's inputs and output gradients, of what other stages send -----------------------------


def arguments(
    stage: int,
    dataflow: StageDataflow,
    receives: Sequence[Receive],
    batch: Receive,
) -> Receive:
    """The call that brings the arguments of a stage, in order, in a fresh list.

    Args:
        stage: whose arguments.
        dataflow: the dataflow between stages.
        receives: brings what each of ``dataflow.sources(stage)`` gives.
        batch: brings the batch's inputs in a fresh list; those that the stage takes are there.
    """
    if dataflow.wiring is None:
        return receives[0] if receives else batch
    makers = dataflow.sources(stage)
    picks: list[tuple[int, int]] = []  # number of the maker (-1: the batch), number of its tensor
    for source in dataflow.wiring.inputs[stage]:
        if source.stage is None:
            picks.append((-1, source.position))
            continue
        positions = dataflow.positions(source.stage, stage) or ()
        picks.append((makers.index(source.stage), positions.index(source.position)))
    wants_batch = any(maker < 0 for maker, _ in picks)

    def bring() -> list[Tensor | None]:
        parts: list[Sequence[Tensor | None]] = [receive() for receive in receives]
        # The batch stands last, where -1 finds it.
        parts.append(batch() if wants_batch else ())
        return [parts[maker][place] for maker, place in picks]

    return bring


def output_gradients(stage: int, dataflow: StageDataflow, receives: Sequence[Receive]) -> Receive:
    """The call that brings the gradients of a stage's outputs, in order, in a fresh list.

    Those of an output that several stages use are added up from the last stage to the first, as
    autograd does in a model that runs as one; an output that none uses has None.

    Args:
        stage: whose outputs.
        dataflow: the dataflow between stages.
        receives: brings what each of ``dataflow.targets(stage)`` gives.
    """
    if dataflow.wiring is None:
        return receives[0]
    count, targets = dataflow.wiring.outputs[stage], dataflow.targets(stage)
    backwards = [
        (receive, dataflow.positions(stage, target) or ())
        for receive, target in reversed(list(zip(receives, targets, strict=True)))
    ]

    def bring() -> list[Tensor | None]:
        totals: list[Tensor | None] = [None] * count
        for receive, positions in backwards:
            for position, gradient in zip(positions, receive(), strict=True):
                totals[position] = added(totals[position], gradient)
        return totals

    return bring


def gradients_for(
    source: int, stage: int, dataflow: StageDataflow
) -> Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]] | None:
    """The function from the gradients of a stage's inputs to those of what ``source`` gave it; None
    where they are the same.

    An output that the stage takes more than once gets the sum.
    """
    places = dataflow.places(source, stage)
    if places is None:
        return None

    def choose(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        chosen: list[Tensor | None] = []
        for first, *others in places:
            total = gradients[first]
            for place in others:
                total = added(total, gradients[place])
            chosen.append(total)
        return chosen

    return choose


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Their sum, a new tensor: either may be in use elsewhere. None stands for zeros."""
    if one is None or other is None:
        return other if one is None else one
    return one + other
