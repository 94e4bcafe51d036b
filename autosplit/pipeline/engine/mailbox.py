"""The messages of one step between this rank and one peer.

Each is received into memory of its own, which lives as long as somebody holds a tensor in it: the
stage that took it until its backward, a user's list, a message that passes it on. On CUDA it is
made under the stream that computes, behind all that this stream was given before, so that a receive
cannot overtake a kernel that still reads what lay there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.pipeline.schedule.routes import Parcel, Routes

from .boundaries import Negotiation
from .first_error import LostPeerError
from .groups import Groups, lost


class _Message(NamedTuple):
    """Tensors being sent or filled. They live here until every operation on them is complete."""

    parcel: Parcel
    tensors: list[Tensor | None]
    works: list[dist.Work]


class _Box:
    """Messages to or from one peer, which ``does`` something with what they name."""

    does = ""

    def __init__(self, link: Groups, peer: int) -> None:
        self._link = link
        self._peer = peer

    def _start(
        self, message: _Message, start: Callable[[Tensor, int], dist.Work | None], tensor: Tensor
    ) -> None:
        message.tensors.append(tensor)
        begun = perf_counter()
        try:
            work = start(tensor, self._peer)
        except RuntimeError as error:
            raise self._lost(message, begun, error) from error
        if work is not None:
            message.works.append(work)

    def _wait(self, message: _Message) -> None:
        """Wait until every operation is complete."""
        begun = perf_counter()
        try:
            for work in message.works:
                work.wait()
        except RuntimeError as error:
            raise self._lost(message, begun, error) from error

    def _lost(self, message: _Message, begun: float, error: RuntimeError) -> LostPeerError:
        what = f"{self._link.named(self._peer)}, which {self.does} {message.parcel}"
        return lost(what, perf_counter() - begun, self._link.timeout, error)


class Outbox(_Box):
    """What was sent to one peer and may not have arrived yet.

    Nothing here asks whether a send is complete: Gloo only knows after a wait, and a wait that
    times out closes the connection. So waits happen where they are known to return at once.
    """

    does = "needs"

    def __init__(self, link: Groups, peer: int) -> None:
        super().__init__(link, peer)
        self._pending: deque[_Message] = deque()
        self._retired = 0

    def put(self, parcel: Parcel, tensors: list[Tensor]) -> None:
        """Start sending; ``tensors`` are contiguous."""
        message = _Message(parcel, [], [])
        self._pending.append(message)
        for tensor in tensors:
            self._start(message, self._link.isend, tensor)

    def retire(self, count: int) -> None:
        """Let go of the first ``count`` messages of this step; waits for any still under way."""
        while self._retired < count:
            self._retired += 1
            self._wait(self._pending.popleft())

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept for as long as it may be under way."""
        return [each for message in self._pending for each in message.tensors if each is not None]

    def drain(self) -> None:
        """End the step: wait for everything under way."""
        self.retire(self._retired + len(self._pending))
        self._retired = 0


class Inbox(_Box):
    """What one peer sends in a step: posted in its order, taken in this rank's.

    Args:
        link: carries the messages.
        peer: the sender.
        routes: what it sends, in its order, and which tensors those are.
        negotiation: where shapes are agreed on.
        device: where tensors are received.
    """

    does = "makes"

    def __init__(
        self,
        link: Groups,
        peer: int,
        routes: Routes,
        negotiation: Negotiation,
        device: torch.device,
    ) -> None:
        super().__init__(link, peer)
        self._routes = routes
        self._parcels = routes.receives[peer]
        self._place = {parcel: place for place, parcel in enumerate(self._parcels)}
        self._negotiation = negotiation
        self._device = device
        self._posted = 0
        self._coming: dict[Parcel, _Message] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """What is posted and was not taken."""
        return [t for message in self._coming.values() for t in message.tensors if t is not None]

    def begin(self) -> None:
        """Start a step."""
        self._posted = 0

    def post_next(self) -> None:
        """Post one receive more, if its shapes are known."""
        known, left = self._negotiation.known, self._parcels[self._posted :]
        if left and left[0].boundary in known:
            self._post()

    def take(self, parcel: Parcel) -> tuple[list[Tensor | None], bool]:
        """Wait for ``parcel``; its tensors, and whether any of them travelled."""
        place = self._place[parcel]
        while self._posted <= place:
            self._negotiation.learn(self._parcels[self._posted].boundary)
            self._post()
        message = self._coming.pop(parcel)
        self._wait(message)
        return message.tensors, bool(message.works)

    def _post(self) -> None:
        parcel = self._parcels[self._posted]
        self._posted += 1
        message = self._coming[parcel] = _Message(parcel, [], [])
        for meta in self._negotiation.crossing(parcel, self._routes.feeds):
            if meta is None:
                message.tensors.append(None)
            else:
                made = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
                self._start(message, self._link.irecv, made)
