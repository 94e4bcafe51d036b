"""Two ranks that send to each other, for spawned processes."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.boundaries import Negotiation, TensorMeta
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.first_error import LostPeerError
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.routes import Parcel, routes_of

CPU = torch.device("cpu")
WIDE = TensorMeta(torch.Size([100_000]), torch.float32, True)


class Sending:
    """Makes fresh tensors and counts how many of those it made before are still alive."""

    def __init__(self, last: bool) -> None:
        self._last = last
        self._made: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        inputs.clear()
        return [torch.zeros(())] if self._last else [self._make()]

    def backward_input(self, microbatch: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        grads.clear()
        return [self._make()] if self._last else [None]

    def backward_weight(self, microbatch: int) -> None:
        pass

    backward = backward_input

    def _make(self) -> Tensor:
        self.alive.append(sum(made() is not None for made in self._made))
        tensor = torch.zeros(WIDE.shape)
        self._made.append(weakref.ref(tensor))
        return tensor


def _alive() -> list[int]:
    schedule, rank = build("1f1b", 2, 8), dist.get_rank()
    groups = Groups(2, CPU, 30.0)
    negotiation = Negotiation("alive", groups, lambda: None)
    negotiation.known[0] = (WIDE,)
    stage = Sending(last=rank == 1)
    transport = Transport(routes_of(schedule, rank), groups, negotiation, device=CPU)
    grad = torch.tensor(1.0)
    executor = Executor({rank: stage}, schedule, rank, transport, loss_grad=grad)
    executor.run([[torch.zeros(1)]] * 8, [[]] * 8)
    groups.destroy()
    return stage.alive


def _posted(prefetch: int) -> list[int]:
    """Receives posted when the step begins, and when the first result is there; of four."""
    schedule, rank = build("gpipe", 2, 4), dist.get_rank()
    groups = Groups(2, CPU, 30.0)
    negotiation = Negotiation("posted", groups, lambda: None)
    negotiation.known[0] = (TensorMeta(torch.Size([2]), torch.float32, False),)
    transport = Transport(
        routes_of(schedule, rank), groups, negotiation, device=CPU, prefetch=prefetch
    )
    results = [Action.parse(f"0F{microbatch}") for microbatch in range(4)]
    counts = []
    with mock.patch.object(groups, "irecv", wraps=groups.irecv) as irecv:
        transport.begin()
        counts.append(irecv.call_count)
        for result in results:
            if rank == 0:
                transport.sender(result)([torch.zeros(2)])
            else:
                transport.receiver(Parcel(result, 1))()
                counts.append(irecv.call_count)
        transport.finish()
    groups.destroy()
    return counts[:2]


def _learned() -> tuple[dict[int, list[tuple[str, bool]]], list[Any]]:
    """Nothing is known beforehand, as in the first evaluation."""
    rank = dist.get_rank()
    groups = Groups(2, CPU, 30.0)
    negotiation = Negotiation("learned", groups, lambda: None)
    schedule = build("gpipe", 2, 1)
    transport = Transport(routes_of(schedule, rank), groups, negotiation, device=CPU)
    result = Action.parse("0F0")
    transport.begin()
    values: list[Any] = []
    if rank == 0:
        transport.sender(result)([torch.zeros(3), torch.full((2,), 7)])
    else:
        values = [
            tensor.tolist()
            for tensor in transport.receiver(Parcel(result, 1))()
            if tensor is not None
        ]
    transport.finish()
    groups.destroy()
    known = {
        boundary: [(str(meta), meta.requires_grad) for meta in metas]
        for boundary, metas in negotiation.known.items()
    }
    return known, values


def _negotiated() -> tuple[TensorMeta, ...]:
    groups = Groups(2, CPU, 30.0)
    negotiation = Negotiation("negotiated", groups, lambda: None)
    meta = TensorMeta(torch.Size([4, 0]), torch.bfloat16, True)
    agreed = negotiation.publish(0, [meta, meta]) if dist.get_rank() == 0 else negotiation.learn(0)
    groups.destroy()
    return agreed


def _ended() -> tuple[bool, str]:
    """Whether the groups are gone once they are let go of, and what a later use says."""
    groups = Groups(2, CPU, 30.0)
    groups.meet()
    group = weakref.ref(groups.group)
    dist.barrier()
    groups.destroy()
    try:
        groups.meet()
    except PipelineError as error:
        return group() is None, str(error)
    return group() is None, ""


def pairwise() -> list[float]:
    """What each other rank sent, over a group for each direction of each pair, as under NCCL."""
    groups, rank = Groups(3, CPU, 30.0), dist.get_rank()
    groups.pairwise = True
    groups.connect([(0, 1), (1, 2)])
    groups.connect([(0, 1), (0, 2)])
    with mock.patch.object(groups, "isend", wraps=groups.isend) as isend:
        groups.connect([(0, 1)], "memory")  # before a step, too, there goes a message each way
    assert isend.call_count == (rank != 2)
    others = [peer for peer in range(3) if peer != rank]
    buffers = [torch.zeros(1) for _ in others]
    works = [groups.irecv(buffer, peer) for buffer, peer in zip(buffers, others, strict=True)]
    works += [groups.isend(torch.tensor([10.0 * rank + peer]), peer) for peer in others]
    for each in works:
        assert each is not None
        each.wait()
    groups.destroy()
    return [float(buffer) for buffer in buffers]


def _kinds() -> list[bool]:
    """Whether tensors of all kinds arrive as they were; and what the backend is given of them."""
    groups, rank = Groups(2, CPU, 30.0), dist.get_rank()
    lane = mock.Mock()
    with mock.patch.object(groups, "_towards", return_value=lane):
        groups.isend(torch.ones(2, dtype=torch.int16), 1 - rank)
    (given,), *_ = lane.send.call_args.args
    found = [given.dtype is torch.uint8]
    for dtype in (torch.int16, torch.uint16, torch.complex64, torch.bool, torch.float8_e5m2):
        for shape in ([3, 2], [], [0, 4]):
            tensor = torch.ones(shape).to(dtype)
            buffer = torch.zeros(shape).to(dtype)
            work = groups.isend(tensor, 1) if rank == 0 else groups.irecv(buffer, 0)
            assert work is not None
            work.wait()
            expected, came = (each.to(torch.complex64) for each in (tensor, buffer))
            found.append(rank == 0 or torch.equal(came, expected))
    groups.destroy()
    return found


def _never() -> str:
    groups = Groups(2, CPU, 30.0)
    groups.timeout = 0.2
    text = ""
    if dist.get_rank() == 1:
        try:
            Negotiation("never", groups, lambda: None).learn(1)
        except LostPeerError as error:
            text = str(error)
    dist.barrier()
    groups.destroy()
    return text


def everything() -> dict[str, Any]:
    learned, values = _learned()
    return {
        "alive": _alive(),
        "posted": {prefetch: _posted(prefetch) for prefetch in (0, 1, 2, 9)},
        "learned": learned,
        "values": values,
        "negotiated": _negotiated(),
        "never": _never(),
        "ended": _ended(),
        "kinds": _kinds(),
    }
