"""Tensors between neighbouring stages, over point-to-point messages or by hand on one rank.

Shapes are agreed on once, so a message is nothing but data. Receives are posted ahead into fresh
buffers that then belong to the stage; sends are not waited for, and what they send is kept until
a later message proves that it arrived (see ``routes``) or the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.groups import PointToPoint
from autosplit.pipeline.mailbox import Inbox, Outbox
from autosplit.pipeline.negotiation import Boundary, Negotiation, TensorMeta
from autosplit.pipeline.routes import Routes, boundary_of

__all__ = ["Boundary", "TensorMeta", "Transport"]

Receive = Callable[[], list[Tensor | None]]
Probe = Callable[[], bool]
Send = Callable[[Sequence[Tensor | None]], None]


class Transport:
    """One rank's messages under one schedule; the same calls every step.

    Args:
        routes: what travels where.
        link: carries the messages.
        negotiation: where the shapes at each boundary are agreed on: before the first step, or
            by the first tensors that cross.
        device: where received tensors are made.
        prefetch: receives kept posted per peer beyond the one being waited for.
        watch: notice messages as they arrive, which takes a thread per peer.
    """

    def __init__(
        self,
        routes: Routes,
        link: PointToPoint,
        negotiation: Negotiation,
        *,
        device: torch.device,
        prefetch: int = 2,
        watch: bool = False,
    ) -> None:
        if prefetch < 0:
            raise PipelineError(f"prefetch is a count of receives, 0 or more; got {prefetch}")
        self._negotiation = negotiation
        self._device = device
        self._proven = routes.proven
        self._outboxes = {peer: Outbox(link, peer) for peer in routes.sends}
        self._inboxes = {
            peer: Inbox(
                link, peer, results, negotiation, device=device, prefetch=prefetch, watch=watch
            )
            for peer, results in routes.receives.items()
        }
        self._target = {r: peer for peer, results in routes.sends.items() for r in results}
        self._source = {r: peer for peer, results in routes.receives.items() for r in results}
        self._here: dict[Action, list[Tensor | None]] = {}

    def begin(self) -> None:
        """Start a step: post the first receives."""
        for inbox in self._inboxes.values():
            inbox.begin()

    def finish(self) -> None:
        """End a step: wait until everything sent has arrived.

        Raises:
            LostPeerError: a peer died or did not take a message in time.
        """
        for outbox in self._outboxes.values():
            outbox.drain()

    def sender(self, result: Action) -> Send:
        """The call that hands ``result`` (an F's or I's, named by its action) to its stage.

        It takes one tensor per tensor of the boundary. Of a gradient only those that need one
        travel, a missing one as zeros. It raises PipelineError, before sending anything, if
        a tensor is not what was agreed on.
        """
        boundary = boundary_of(result)
        outbox = None if result not in self._target else self._outboxes[self._target[result]]
        prepare = _outputs if result.kind is ActionKind.FORWARD else self._gradients

        def send(tensors: Sequence[Tensor | None]) -> None:
            ready = prepare(result, tensors, self._agreed(boundary, tensors))
            if outbox is None:
                self._here[result] = ready
            else:
                outbox.put(result, [tensor.contiguous() for tensor in ready if tensor is not None])

        return send

    def receiver(self, result: Action) -> tuple[Receive, Probe]:
        """Two calls: one waits for ``result`` and returns a fresh list of its tensors, the other
        says whether it is there (never, for a message that nobody watches).

        A gradient comes with one entry per tensor of the boundary, None where it needs none.
        The first call raises LostPeerError if the sender died or did not send in time.
        """
        if result not in self._source:
            return lambda: self._here.pop(result), lambda: result in self._here
        peer = self._source[result]
        inbox, outbox = self._inboxes[peer], self._outboxes.get(peer)
        proven = self._proven[result]

        def receive() -> list[Tensor | None]:
            tensors, travelled = inbox.take(result)
            if travelled and outbox is not None:
                outbox.retire(proven)
            return tensors

        return receive, lambda: inbox.arrived(result)

    def _agreed(self, boundary: int, tensors: Sequence[Tensor | None]) -> Boundary:
        agreed = self._negotiation.known.get(boundary)
        if agreed is None:
            agreed = self._negotiation.publish(
                boundary, [TensorMeta.of(t) for t in _given(tensors)]
            )
        return agreed

    def _gradients(
        self, result: Action, tensors: Sequence[Tensor | None], agreed: Boundary
    ) -> list[Tensor | None]:
        if len(tensors) < len(agreed):
            raise PipelineError(
                f"stage {result.stage} gave {len(tensors)} input gradients for microbatch "
                f"{result.microbatch}; expected one for each of its {len(agreed)} inputs"
            )
        ready: list[Tensor | None] = []
        # The last stage's targets come after the boundary's tensors and take no part.
        for place, (tensor, meta) in enumerate(zip(tensors, agreed, strict=False)):
            if not meta.requires_grad:
                ready.append(None)
                continue
            if tensor is None:
                tensor = torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)
            _check(f"gradient of input {place} of stage {result.stage}", result, tensor, meta)
            ready.append(tensor)
        return ready


def _outputs(
    result: Action, tensors: Sequence[Tensor | None], agreed: Boundary
) -> list[Tensor | None]:
    given = _given(tensors)
    if len(given) != len(agreed):
        raise PipelineError(
            f"stage {result.stage} put out {len(given)} tensors for microbatch "
            f"{result.microbatch}, but {len(agreed)} were agreed on when the pipeline was "
            "built; a stage must put out the same tensors every time"
        )
    for place, (tensor, meta) in enumerate(zip(given, agreed, strict=True)):
        _check(f"output {place} of stage {result.stage}", result, tensor, meta)
    return list(given)


def _check(name: str, result: Action, tensor: Tensor, meta: TensorMeta) -> None:
    if tensor.shape != meta.shape or tensor.dtype is not meta.dtype:
        raise PipelineError(
            f"{name} in microbatch {result.microbatch} is {TensorMeta.of(tensor)}, but {meta} was "
            "agreed on when the pipeline was built: shapes between stages are static; give every "
            "microbatch the same shape, or build a new trainer"
        )


def _given(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
