"""The messages of one step between this rank and one peer, in flight and not yet taken."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.pipeline.action import Action, ActionKind
from autosplit.pipeline.groups import PointToPoint, losing
from autosplit.pipeline.negotiation import Negotiation
from autosplit.pipeline.routes import boundary_of


@dataclass
class _Message:
    """Tensors being sent or filled. They live here until every operation on them is complete."""

    result: Action
    tensors: list[Tensor | None] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)
    arrival: Future[None] | None = None

    def wait(self) -> None:
        """Wait until every operation is complete."""
        for work in self.works:
            work.wait()


class Outbox:
    """What was sent to one peer and may not have arrived yet.

    Nothing here asks whether a send is complete: Gloo only knows after a wait, and a wait that
    times out closes the connection. So waits happen where they are known to return at once.
    """

    def __init__(self, link: PointToPoint, peer: int) -> None:
        self._peer = peer
        self._timeout = link.timeout
        self._link = link
        self._pending: deque[_Message] = deque()
        self._retired = 0

    def put(self, result: Action, tensors: list[Tensor]) -> None:
        """Start sending; ``tensors`` are contiguous."""
        message = _Message(result, [*tensors])
        self._pending.append(message)
        with losing(f"rank {self._peer}, which needs {result}", self._timeout):
            for tensor in tensors:
                work = self._link.isend(tensor, self._peer)
                if work is not None:
                    message.works.append(work)

    def retire(self, count: int) -> None:
        """Let go of the first ``count`` messages of this step; waits for any still under way."""
        while self._retired < count:
            message = self._pending.popleft()
            self._retired += 1
            with losing(f"rank {self._peer}, which needs {message.result}", self._timeout):
                message.wait()

    def drain(self) -> None:
        """End the step: wait for everything under way."""
        self.retire(self._retired + len(self._pending))
        self._retired = 0


class Inbox:
    """What one peer sends in a step: posted in its order, taken in this rank's.

    Args:
        link: carries the messages.
        peer: the sender.
        results: what it sends, in its order.
        prefetch: receives kept posted beyond what was taken.
        watch: have ``arrived`` notice messages. Nothing else can tell without ending the
            connection, so a thread waits for them.
    """

    def __init__(
        self,
        link: PointToPoint,
        peer: int,
        results: tuple[Action, ...],
        negotiation: Negotiation,
        *,
        device: torch.device,
        prefetch: int,
        watch: bool,
    ) -> None:
        self._peer = peer
        self._timeout = link.timeout
        self._link = link
        self._results = results
        self._place = {result: place for place, result in enumerate(results)}
        self._negotiation = negotiation
        self._device = device
        self._prefetch = prefetch
        self._watcher = ThreadPoolExecutor(1, f"from rank {peer}") if watch else None
        self._posted = 0
        self._coming: dict[Action, _Message] = {}

    def begin(self) -> None:
        """Start a step: post the first receives."""
        self._posted = 0
        self._post_ahead(self._prefetch)

    def take(self, result: Action) -> tuple[list[Tensor | None], bool]:
        """Wait for ``result``; its tensors, and whether any of them travelled."""
        place = self._place[result]
        while self._posted <= place:
            self._negotiation.learn(boundary_of(self._results[self._posted]))
            self._post()
        # Before the wait, so that it delays nothing once the message is here.
        self._post_ahead(place + 1 + self._prefetch)
        message = self._coming.pop(result)
        with losing(f"rank {self._peer}, which makes {result}", self._timeout):
            if message.arrival is None:
                message.wait()
            else:
                message.arrival.result()
        return message.tensors, bool(message.works)

    def arrived(self, result: Action) -> bool:
        """Whether ``take`` would return at once; False for what nobody watches."""
        message = self._coming.get(result)
        return message is not None and message.arrival is not None and message.arrival.done()

    def _post_ahead(self, count: int) -> None:
        """Post receives until ``count`` are posted, as far as their shapes are known."""
        while self._posted < min(count, len(self._results)):
            if boundary_of(self._results[self._posted]) not in self._negotiation.known:
                return
            self._post()

    def _post(self) -> None:
        result = self._results[self._posted]
        self._posted += 1
        message = self._coming[result] = _Message(result)
        with losing(f"rank {self._peer}, which makes {result}", self._timeout):
            for meta in self._negotiation.known[boundary_of(result)]:
                if result.kind is not ActionKind.FORWARD and not meta.requires_grad:
                    message.tensors.append(None)
                    continue
                buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
                message.tensors.append(buffer)
                work = self._link.irecv(buffer, self._peer)
                if work is not None:
                    message.works.append(work)
        if self._watcher is not None:
            message.arrival = self._watcher.submit(message.wait)
