"""Pass tensors between stages: by point-to-point messages between ranks, by references within a
rank.

In training, every rank knows the shapes of a microbatch's messages before the step, so messages
contain only data. In evaluation, and after a stage without graphs, shapes may be unknown. Then the
sender sends the shapes before the first message of each size over a boundary. Receives are posted
ahead, each into memory of its own. Sends are not waited for: their tensors are kept until a later
message proves that they arrived (see ``Routes.acked_sends``) or the step ends. An output that
several stages take is sent to each.
"""

from __future__ import annotations

import pickle
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.boundaries import Boundaries, Boundary, TensorMeta
from autosplit.pipeline.engine.stage_arguments import Receive, gradients_for
from autosplit.pipeline.schedule.routes import Routes, StageMessage, outgoing_messages
from autosplit.pipeline.schedule.schedule import Action, ActionKind
from autosplit.ranks.first_error import LostPeerError
from autosplit.ranks.groups import Groups, lost_peer_error

REFUSED: list[Tensor] = []
"""Stands for the outputs of a stage that could not take the microbatch."""
_STAND_IN = (1,) * 16
"""The shape of the tensor of one byte that is sent for each output of a stage that could not take a
microbatch. No model has tensors of so many dimensions."""

Send = Callable[[Sequence[Any]], None]


class _Transfer(NamedTuple):
    """A message being sent or received. It keeps its tensors until every operation is complete.

    Attributes:
        message: the message.
        verb: what the peer does with the message, for error texts: "makes" or "needs".
        tensors: the tensors; None for a gradient that is not sent.
        works: handles of the operations that may still run.
    """

    message: StageMessage
    verb: str
    tensors: list[Tensor | None]
    works: list[dist.Work]


class Mailbox:
    """The messages of one step between this rank and one peer.

    Receives are posted in the order in which the peer sends, and taken in the order in which this
    rank needs them.

    A mailbox never tests whether a send is complete: Gloo learns that only by a wait, and a wait
    that times out closes the connection. So the mailbox waits only for sends that are known to be
    complete.

    Each received tensor has memory of its own, which lives as long as an object refers to it: a
    stage until its backward, a user's list, another message. On CUDA the memory is allocated on the
    compute stream, after all kernels launched so far, so that a receive cannot overtake a kernel
    that still reads the previous contents.

    Args:
        link: carries the messages.
        peer: the other rank.
        routes: the messages from the peer, in its order.
        device: the device of received tensors.
    """

    def __init__(
        self,
        link: Groups,
        peer: int,
        routes: Routes,
        device: torch.device,
    ) -> None:
        self._link, self._peer, self._device = link, peer, device
        self._boundaries: Sequence[Boundaries] = ()
        self._dataflow = routes.dataflow
        # The stages whose outputs the peer knows.
        self._sent_metas = weakref.WeakKeyDictionary[Boundaries, set[int]]()
        self._messages = routes.receives.get(peer, ())
        self._posted = self._retired = 0
        self._receiving: dict[StageMessage, _Transfer] = {}
        self._sending: deque[_Transfer] = deque()

    @property
    def message_tensors(self) -> Iterator[Tensor]:
        """Tensors of posted receives that no action has taken yet, and of sends that may still
        run.
        """
        for transfer in (*self._receiving.values(), *self._sending):
            yield from (tensor for tensor in transfer.tensors if tensor is not None)

    def begin_step(self, boundaries: Sequence[Boundaries]) -> None:
        """Prepare for the messages of a new step, with these boundaries by microbatch."""
        self._posted = self._retired = 0
        if boundaries is not self._boundaries:
            self._boundaries = boundaries
            for of_microbatch in boundaries:
                self._sent_metas.setdefault(of_microbatch, {*of_microbatch.outputs})

    def _boundaries_of(self, message: StageMessage) -> Boundaries:
        return self._boundaries[message.result.microbatch]

    def start_send(self, message: StageMessage, tensors: Sequence[Tensor | None]) -> None:
        """Start sending a message; entries that are None are not sent."""
        transfer = _Transfer(message, "needs", [], [])
        self._sending.append(transfer)
        boundaries = self._boundaries_of(message)
        # The stage that gets a gradient has computed the tensor, and knows its shape.
        if message.forward and message.boundary not in self._sent_metas[boundaries]:
            self._sent_metas[boundaries].add(message.boundary)
            text = bytearray(pickle.dumps(boundaries.outputs[message.boundary]))
            metas = torch.frombuffer(text.ljust(_META_BYTES), dtype=torch.uint8)
            self._start(transfer, self._link.isend, metas.to(self._device))
        for tensor in tensors:
            if tensor is not None:
                self._start(transfer, self._link.isend, tensor.contiguous())

    def retire(self, count: int) -> None:
        """Free the first ``count`` sends of this step; waits for any that still runs."""
        while self._retired < count:
            self._retired += 1
            self._wait(self._sending.popleft())

    def finish_step(self) -> None:
        """Wait until all sends of the step have ended."""
        self.retire(self._retired + len(self._sending))

    def post_next(self) -> None:
        """Post the next receive, if its shapes are known."""
        if self._posted < len(self._messages):
            message = self._messages[self._posted]
            if message.boundary in self._boundaries_of(message).outputs:
                self._post()

    def await_message(
        self, message: StageMessage, place: int, acked_sends: int
    ) -> list[Tensor | None]:
        """Wait for a message and return its tensors.

        Args:
            message: the message.
            place: the message's place in the peer's order of sends.
            acked_sends: the number of sends to the peer that must have arrived once this message
                has arrived with a tensor.
        """
        while self._posted <= place:
            self._receive_metas(self._messages[self._posted])
            self._post()
        transfer = self._receiving.pop(message)
        self._wait(transfer)
        if transfer.works:
            self.retire(acked_sends)
        return transfer.tensors

    def _receive_metas(self, message: StageMessage) -> None:
        """Receive the shapes at a boundary, before the first message over that boundary."""
        outputs, boundary = self._boundaries_of(message).outputs, message.boundary
        if boundary not in outputs:
            metas = torch.empty(_META_BYTES, dtype=torch.uint8, device=self._device)
            transfer = _Transfer(message, "makes", [], [])
            self._start(transfer, self._link.irecv, metas)
            self._wait(transfer)
            outputs[boundary] = pickle.loads(bytes(metas.tolist()))

    def _post(self) -> None:
        """Post the receive of the next message."""
        message = self._messages[self._posted]
        self._posted += 1
        transfer = self._receiving[message] = _Transfer(message, "makes", [], [])
        for meta in self._boundaries_of(message).tensors_in(message, self._dataflow):
            if meta is None:
                transfer.tensors.append(None)
            else:
                buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
                self._start(transfer, self._link.irecv, buffer)

    def _start(
        self, transfer: _Transfer, start: Callable[[Tensor, int], dist.Work | None], tensor: Tensor
    ) -> None:
        """Call ``start``, which begins to send or receive one tensor of a transfer, and keep its
        handle.
        """
        transfer.tensors.append(tensor)
        start_time = perf_counter()
        try:
            work = start(tensor, self._peer)
        except RuntimeError as error:
            raise self._as_lost_peer(transfer, start_time, error) from error
        if work is not None:
            transfer.works.append(work)

    def _wait(self, transfer: _Transfer) -> None:
        """Wait until every operation of a transfer is complete."""
        start_time = perf_counter()
        try:
            for work in transfer.works:
                work.wait()
        except RuntimeError as error:
            raise self._as_lost_peer(transfer, start_time, error) from error

    def _as_lost_peer(
        self, transfer: _Transfer, start_time: float, error: RuntimeError
    ) -> LostPeerError:
        peer = f"{self._link.rank_name(self._peer)}, which {transfer.verb} {transfer.message}"
        return lost_peer_error(peer, perf_counter() - start_time, self._link.timeout, error)


_META_BYTES = 2**16
"""Size of the message with the shapes at a boundary; enough for about two thousand tensors."""


class Transport:
    """One rank's messages under one schedule, for every step.

    Args:
        routes: the messages of this rank.
        link: carries the messages.
        device: the device of received tensors.
        posts: for each action, the peers from which the next receives are posted before the action,
            as ``recv_posting_order`` returns them. Over NCCL, a posted receive is a kernel that
            waits on the device, and may delay kernels that are launched after it.

    Attributes:
        dataflow: the dataflow between stages.
    """

    def __init__(
        self,
        routes: Routes,
        link: Groups,
        *,
        device: torch.device,
        posts: Mapping[Action, Sequence[int]],
    ) -> None:
        self._posts, self._device = posts, device
        self._boundaries: Sequence[Boundaries] = ()
        self._routes, self.dataflow = routes, routes.dataflow
        self._mailboxes = {
            peer: Mailbox(link, peer, routes, device)
            for peer in {**routes.sends, **routes.receives}
        }
        self._target = {
            message: peer for peer, messages in routes.sends.items() for message in messages
        }
        self._source = {
            message: peer for peer, messages in routes.receives.items() for message in messages
        }
        # Messages within the rank: each has a list of its own, which holds its tensors, if sent.
        self._local = defaultdict[StageMessage, list[Any]](list)

    def begin_step(self, boundaries: Sequence[Boundaries]) -> None:
        """Prepare for the messages of a new step.

        Args:
            boundaries: by microbatch, the tensors between stages; unknown ones are set by the first
                message.
        """
        self._boundaries = boundaries
        for tensors in self._local.values():
            tensors.clear()  # a step that failed may have left some
        for box in self._mailboxes.values():
            box.begin_step(boundaries)

    def posts(self, action: Action) -> list[Callable[[], None]]:
        """The calls that post receives before an action."""
        return [self._mailboxes[peer].post_next for peer in self._posts.get(action, ())]

    def finish_step(self) -> None:
        """Wait until all messages that the step has sent have arrived.

        Raises:
            LostPeerError: a peer died or did not take a message in time.
        """
        for box in self._mailboxes.values():
            box.finish_step()

    @property
    def message_tensors(self) -> Iterator[Tensor]:
        """Tensors of all messages: received, sent, and between stages of this rank."""
        for tensors in chain.from_iterable(self._local.values()):
            yield from (tensor for tensor in tensors if tensor is not None)
        for box in self._mailboxes.values():
            yield from box.message_tensors

    def sender(self, result: Action) -> Send | None:
        """Return a function that passes the result of an F or I to other stages; None if no stage
        needs the result.

        The function takes one tensor per output of an F, or one gradient per input of an I. Only
        the agreed gradients are sent; zeros are sent for a gradient that is missing in this
        microbatch. If a tensor has another shape or dtype than agreed, the function raises
        PipelineError before sending anything.
        """
        messages = outgoing_messages(result, self.dataflow)
        if result.kind is ActionKind.FORWARD:
            return self._output_sender(result, messages)
        sends = [self._gradient_sender(message) for message in messages]
        if len(sends) <= 1:
            return sends[0] if sends else None

        def send(gradients: Sequence[Tensor | None]) -> None:
            for send_to_stage in sends:
                send_to_stage(gradients)

        return send

    def receiver(self, message: StageMessage) -> Receive:
        """Return a function that waits for ``message`` and returns a new list of its tensors.

        A message of gradients has one entry per output that was sent in the other direction; None
        for an output that needs no gradient. The function raises LostPeerError if the sender died
        or did not send in time.
        """
        if message not in self._source:
            return self._local[message].pop
        peer, routes = self._source[message], self._routes
        place = routes.receives[peer].index(message)
        return partial(
            self._mailboxes[peer].await_message, message, place, routes.acked_sends[message]
        )

    def _output_sender(self, result: Action, messages: Sequence[StageMessage]) -> Send:
        dataflow = self.dataflow
        puts = [
            (self._put_call(message), dataflow.positions(message.boundary, message.taker))
            for message in messages
        ]
        stage = result.stage

        def send(tensors: Sequence[Tensor]) -> None:
            """Check a stage's outputs, and send each later stage the outputs that it reads."""
            outputs = self._boundaries[result.microbatch].outputs
            if tensors is REFUSED:
                tensors = self._stand_ins(stage, outputs.get(stage))
            if stage not in outputs:  # later outputs must match the first
                dataflow.check_outputs(stage, len(tensors))
                outputs[stage] = tuple(map(TensorMeta.of, tensors))
            agreed = outputs[stage]
            if len(tensors) != len(agreed):
                raise PipelineError(
                    f"stage {stage} returned {len(tensors)} tensors for microbatch "
                    f"{result.microbatch}, but {len(agreed)} were agreed on when the pipeline was "
                    "built. A stage must return the same number of tensors for every microbatch"
                )
            for place, (tensor, meta) in enumerate(zip(tensors, agreed, strict=True)):
                if tensor.shape != meta.shape or tensor.dtype is not meta.dtype:
                    raise _mismatch(f"output {place} of stage {stage}", result, tensor, meta)
            for put, positions in puts:
                put([*tensors] if positions is None else [tensors[at] for at in positions])

        return send

    def _stand_ins(self, stage: int, agreed: Boundary | None) -> list[Tensor]:
        """Tensors in place of the outputs of a stage that could not take a microbatch: zeros if the
        other ranks expect certain shapes.
        """
        if agreed is not None:
            return [torch.zeros(m.shape, dtype=m.dtype, device=self._device) for m in agreed]
        wiring = self.dataflow.wiring
        count = 1 if wiring is None else wiring.outputs[stage]
        return [torch.zeros(_STAND_IN, dtype=torch.uint8, device=self._device)] * count

    def _gradient_sender(self, message: StageMessage) -> Send:
        put, result, crossing = self._put_call(message), message.result, message.crossing
        choose = gradients_for(message.boundary, message.taker, self.dataflow)

        def send(gradients: Sequence[Tensor | None]) -> None:
            """Check a stage's input gradients; send the agreed ones to an earlier stage."""
            boundaries = self._boundaries[result.microbatch]
            agreed = boundaries.tensors.get(crossing)
            if agreed is None:
                agreed = boundaries.tensors_in(message, self.dataflow)
            if choose is not None:
                gradients = choose(gradients)
            if len(gradients) < len(agreed):
                raise PipelineError(
                    f"stage {result.stage} returned {len(gradients)} input gradients for "
                    f"microbatch {result.microbatch}; expected one for each of its "
                    f"{len(agreed)} inputs"
                )
            ready: list[Tensor | None] = []
            # The last stage's targets follow the boundary's tensors, and get no gradient.
            for place, (tensor, meta) in enumerate(zip(gradients, agreed, strict=False)):
                if meta is None:
                    if tensor is not None:
                        self._refuse_unexpected(message, place)
                        tensor = None
                elif tensor is None:
                    tensor = torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)
                elif tensor.shape != meta.shape or tensor.dtype is not meta.dtype:
                    raise _mismatch(self._gradient_name(message, place), result, tensor, meta)
                ready.append(tensor)
            put(ready)

        return send

    def _put_call(self, message: StageMessage) -> Send:
        if message not in self._target:
            return self._local[message].append
        return partial(self._mailboxes[self._target[message]].start_send, message)

    def _refuse_unexpected(self, message: StageMessage, place: int) -> None:
        """Refuse a gradient that the earlier stage could use, but does not wait for."""
        boundary, taker = message.boundary, message.taker
        outputs = self._boundaries[message.result.microbatch].outputs[boundary]
        metas = self.dataflow.select(outputs, boundary, taker)
        if metas[place].requires_grad:
            raise PipelineError(
                f"there is a {self._gradient_name(message, place)} in microbatch "
                f"{message.result.microbatch}, but there was none when the graphs for its sizes "
                f"were captured: something that the forward of stage {taker} reads has changed, so "
                "that the loss depends on more inputs. Build a new trainer"
            )

    def _gradient_name(self, message: StageMessage, place: int) -> str:
        positions = self.dataflow.positions(message.boundary, message.taker)
        if positions is None:
            return f"gradient of input {place} of stage {message.taker}"
        output = f"output {positions[place]} of stage {message.boundary}"
        return f"gradient from stage {message.taker} for {output}"


def stands_for_refused(value: object) -> bool:
    """Whether an argument of a stage stands for an output of a stage that could not take the
    microbatch.
    """
    return isinstance(value, Tensor) and value.shape == _STAND_IN and value.dtype is torch.uint8


def _mismatch(name: str, result: Action, tensor: Tensor, meta: TensorMeta) -> PipelineError:
    return PipelineError(
        f"{name} in microbatch {result.microbatch} is {TensorMeta.of(tensor)}, but {meta} was "
        "agreed on for the sizes of its inputs: sizes between stages must follow from the sizes of "
        "the batch, not from values or from state. Build a new trainer if the stage has changed"
    )
