"""The messages of one step between this rank and one peer, and the memory that they come into.

Receive buffers are used again as soon as nobody holds a tensor in them any more. A received
activation lives in the stage that took it until its backward, and whoever keeps it longer (a
user's list, another stage, a message that passes it on) keeps it alive by its storage, whatever
view of it they hold. So memory is free when its storage has no users but this pool. A schedule then
settles at as many buffers as it has in flight at most; no step after the first makes one, unless
somebody kept one.

On CUDA a buffer is used again only under the stream under which it was made. A receive starts
behind all that this stream was given before, so it cannot overtake a kernel that still reads; work
that a stage gives another stream must be waited for by this one before the stage lets go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.pipeline.schedule.routes import Parcel, Routes
from autosplit.torch_internals.state import storage_users

from .first_error import LostPeerError
from .groups import PointToPoint, lost
from .shapes import Negotiation, TensorMeta

_Key = tuple[torch.Size, torch.dtype, int]


class Buffers:
    """The buffers of one rank under one schedule.

    Attributes:
        made: how many were made so far.

    Args:
        device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.made = 0
        self._device = device
        self._rings: dict[_Key, deque[_Buffer]] = {}

    def take(self, meta: TensorMeta) -> Tensor:
        """A contiguous tensor in memory that nobody else has; what it holds means nothing."""
        ring = self._rings.setdefault((meta.shape, meta.dtype, self._stream()), deque())
        for _ in range(len(ring)):
            buffer = ring[0]
            ring.rotate(-1)  # what was used last is asked last: it is the least likely to be free
            if buffer.is_free():
                return buffer.tensor()
        self.made += 1
        ring.append(_Buffer(meta, self._device))
        return ring[-1].tensor()

    @property
    def tensors(self) -> list[Tensor]:
        """One over each buffer, whoever uses it."""
        return [buffer.tensor() for ring in self._rings.values() for buffer in ring]

    def settle(self) -> None:
        """At the end of a step, leave what is still in use to those who use it."""
        for key, ring in self._rings.items():
            if not all(buffer.is_free() for buffer in ring):
                self._rings[key] = deque(buffer for buffer in ring if buffer.is_free())

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return torch.cuda.current_stream(self._device).cuda_stream


class _Buffer:
    """One piece of memory, and the tensors over it that were handed out."""

    def __init__(self, meta: TensorMeta, device: torch.device) -> None:
        with torch.inference_mode(False):  # or it could never be written outside of that mode
            self._tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        self._storage = self._tensor.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._alone = self._users()

    def is_free(self) -> bool:
        """Whether nobody else has a tensor, a view or the storage, and it was not shrunk."""
        return self._users() == self._alone and self._storage.nbytes() == self._bytes

    def tensor(self) -> Tensor:
        """A tensor of its own over the memory."""
        return self._tensor.data

    def _users(self) -> tuple[int, int]:
        return storage_users(self._storage)


_NOTED = 64  # of the last messages


class _Message:
    """Tensors being sent or filled. They live here until every operation on them is complete."""

    __slots__ = ("arrival", "parcel", "tensors", "works")

    def __init__(self, parcel: Parcel, tensors: list[Tensor | None]) -> None:
        self.parcel = parcel
        self.tensors = tensors
        self.works: list[dist.Work] = []
        self.arrival: Future[None] | None = None

    def wait(self) -> None:
        """Wait until every operation is complete."""
        for work in self.works:
            work.wait()


class Outbox:
    """What was sent to one peer and may not have arrived yet.

    Nothing here asks whether a send is complete: Gloo only knows after a wait, and a wait that
    times out closes the connection. So waits happen where they are known to return at once.

    Attributes:
        took: seconds in which each of the last messages was handed over.
    """

    def __init__(self, link: PointToPoint, peer: int) -> None:
        self._peer = peer
        self._timeout = link.timeout
        self._link = link
        self._pending: deque[_Message] = deque()
        self._retired = 0
        self.took: deque[float] = deque(maxlen=_NOTED)

    def put(self, parcel: Parcel, tensors: list[Tensor]) -> None:
        """Start sending; ``tensors`` are contiguous."""
        message = _Message(parcel, [*tensors])
        self._pending.append(message)
        start = perf_counter()
        try:
            for tensor in tensors:
                work = self._link.isend(tensor, self._peer)
                if work is not None:
                    message.works.append(work)
        except RuntimeError as error:
            raise self._lost(parcel, start, error) from error
        self.took.append(perf_counter() - start)

    def retire(self, count: int) -> None:
        """Let go of the first ``count`` messages of this step; waits for any still under way."""
        while self._retired < count:
            message = self._pending.popleft()
            self._retired += 1
            start = perf_counter()
            try:
                message.wait()
            except RuntimeError as error:
                raise self._lost(message.parcel, start, error) from error

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept for as long as it may be under way."""
        return [each for message in self._pending for each in message.tensors if each is not None]

    def drain(self) -> None:
        """End the step: wait for everything under way."""
        self.retire(self._retired + len(self._pending))
        self._retired = 0

    def _lost(self, parcel: Parcel, start: float, error: RuntimeError) -> LostPeerError:
        what = f"{self._link.named(self._peer)}, which needs {parcel}"
        return lost(what, perf_counter() - start, self._timeout, error)


class Inbox:
    """What one peer sends in a step: posted in its order, taken in this rank's.

    Args:
        link: carries the messages.
        peer: the sender.
        routes: what it sends, in its order, and which tensors those are.
        negotiation: where shapes are agreed on.
        buffers: what the messages are received into.
        prefetch: receives kept posted beyond what was taken.
        watch: have ``arrived`` notice messages. Nothing else can tell without ending the
            connection, so a thread waits for them.
    """

    def __init__(
        self,
        link: PointToPoint,
        peer: int,
        routes: Routes,
        negotiation: Negotiation,
        buffers: Buffers,
        *,
        prefetch: int,
        watch: bool,
    ) -> None:
        self._peer = peer
        self._timeout = link.timeout
        self._link = link
        self._routes = routes
        self._parcels = routes.receives[peer]
        self._place = {parcel: place for place, parcel in enumerate(self._parcels)}
        self._negotiation = negotiation
        self._buffers = buffers
        self._prefetch = prefetch
        self._watcher = ThreadPoolExecutor(1, f"from rank {peer}") if watch else None
        self._posted = 0
        self._coming: dict[Parcel, _Message] = {}
        self._agreed: dict[Parcel, Sequence[TensorMeta | None]] = {}

    def begin(self) -> None:
        """Start a step: post the first receives."""
        self._posted = 0
        self._post_ahead(self._prefetch)

    def take(self, parcel: Parcel) -> tuple[list[Tensor | None], bool]:
        """Wait for ``parcel``; its tensors, and whether any of them travelled."""
        place = self._place[parcel]
        while self._posted <= place:
            self._negotiation.learn(self._parcels[self._posted].boundary)
            self._post()
        # Before the wait, so that it delays nothing once the message is here.
        self._post_ahead(place + 1 + self._prefetch)
        message = self._coming.pop(parcel)
        start = perf_counter()
        try:
            if message.arrival is None:
                message.wait()
            else:
                message.arrival.result()
        except RuntimeError as error:
            raise self._lost(parcel, start, error) from error
        return message.tensors, bool(message.works)

    def arrived(self, parcel: Parcel) -> bool:
        """Whether ``take`` would return at once; False for what nobody watches."""
        message = self._coming.get(parcel)
        return message is not None and message.arrival is not None and message.arrival.done()

    def _post_ahead(self, count: int) -> None:
        """Post receives until ``count`` are posted, as far as their shapes are known."""
        while self._posted < min(count, len(self._parcels)):
            parcel = self._parcels[self._posted]
            if parcel not in self._agreed and parcel.boundary not in self._negotiation.known:
                return
            self._post()

    def _post(self) -> None:
        parcel = self._parcels[self._posted]
        self._posted += 1
        message = self._coming[parcel] = _Message(parcel, [])
        start = perf_counter()
        try:
            for meta in self._metas(parcel):
                if meta is None:
                    message.tensors.append(None)
                    continue
                buffer = self._buffers.take(meta)
                message.tensors.append(buffer)
                work = self._link.irecv(buffer, self._peer)
                if work is not None:
                    message.works.append(work)
        except RuntimeError as error:
            raise self._lost(parcel, start, error) from error
        if self._watcher is not None:
            message.arrival = self._watcher.submit(message.wait)

    def _metas(self, parcel: Parcel) -> Sequence[TensorMeta | None]:
        """What comes with a parcel; None for a gradient that is not wanted."""
        found = self._agreed.get(parcel)
        if found is None:
            agreed = self._negotiation.known[parcel.boundary]
            carried = self._routes.carried(parcel)
            metas = agreed if carried is None else [agreed[position] for position in carried]
            found = [meta if parcel.forward or meta.requires_grad else None for meta in metas]
            self._agreed[parcel] = found
        return found

    def _lost(self, parcel: Parcel, start: float, error: RuntimeError) -> LostPeerError:
        what = f"{self._link.named(self._peer)}, which makes {parcel}"
        return lost(what, perf_counter() - start, self._timeout, error)
