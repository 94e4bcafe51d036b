"""Messages between two real ranks, and hand-over within one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.boundaries import Boundaries, TensorMeta
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.routes import StageDataflow, StageMessage, routes_of
from autosplit.pipeline.schedule.schedule import Action
from autosplit.ranks.groups import Groups
from tests.kept_ranks import ranks

CPU = torch.device("cpu")
F0, I0 = Action.parse("0F0"), Action.parse("1I0")


@ranks(2)
def test_tensors_travel_as_bytes_whatever_they_hold() -> None:
    """NCCL (of torch 2.13) sends neither int16 nor complex64."""
    groups, rank = Groups(2, CPU, 30.0), dist.get_rank()
    groups.connect([(0, 1)])
    lane = mock.Mock()
    with mock.patch.object(groups, "between", return_value=lane):
        groups.isend(torch.ones(2, dtype=torch.int16), 1 - rank)
    (inputs,), *_ = lane.send.call_args.args
    assert inputs.dtype is torch.uint8
    for dtype in (torch.int16, torch.uint16, torch.complex64, torch.bool, torch.float8_e5m2):
        one = torch.ones([]).to(dtype)
        for tensor in (one.repeat(3, 2), one, one.repeat(0, 4), one.expand(1)):
            buffer = torch.zeros(tensor.shape).to(dtype)
            work = groups.isend(tensor, 1) if rank == 0 else groups.irecv(buffer, 0)
            assert work is not None
            work.wait()
            expected, came = (item.to(torch.complex64) for item in (tensor, buffer))
            assert rank == 0 or torch.equal(came, expected)
    groups.destroy()


@ranks(2)
def test_connections_end_when_a_trainer_is_closed() -> None:
    """Not when the garbage collector comes, which would hold up whatever runs then."""
    groups = Groups(2, CPU, 30.0)
    groups.barrier()
    group = weakref.ref(groups.group)
    dist.barrier()
    groups.destroy()
    with pytest.raises(PipelineError, match=r"^this trainer was closed: build a new one\nMore: "):
        groups.barrier()
    assert group() is None


# --- on one rank --------------------------------------------------------------------------


def _transport(*metas: TensorMeta, given: Sequence[bool] = ()) -> Transport:
    groups = Groups(1, CPU, 1.0)
    boundaries, dataflow = Boundaries(), StageDataflow(2)
    boundaries.outputs |= {0: metas, 1: (_meta(),)}
    dependence = [given, [False] * len(given)] if given else None
    boundaries.resolve_gradients([None, dependence], dataflow)
    routes = routes_of(build("gpipe", 2, 1, ranks=1))[0]
    transport = Transport(routes, groups, device=CPU, posts={})
    transport.begin_step([boundaries])
    return transport


def _meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> TensorMeta:
    return TensorMeta(torch.Size(shape), dtype, grad)


def test_stages_of_a_rank_pass_tensors_without_copies() -> None:
    transport = _transport(_meta(2), _meta(3, dtype=torch.int64, grad=False))
    tensors = [torch.zeros(2), torch.zeros(3, dtype=torch.int64)]
    transport.sender(F0)(tensors)
    received = transport.receiver(StageMessage(F0, 1))()
    assert all(a is b for a, b in zip(received, tensors, strict=True))
    with pytest.raises(IndexError):
        transport.receiver(StageMessage(F0, 1))()


def test_gradients_that_were_agreed_on_come_back_one_missing_in_a_microbatch_as_zeros() -> None:
    metas = _meta(2), _meta(3, grad=False), _meta(1, 2, dtype=torch.bfloat16), _meta(4)
    transport = _transport(*metas, given=[True, False, True, False])
    grads: list[Tensor | None] = [torch.ones(2), torch.ones(3), None, None, torch.ones(5)]
    transport.sender(I0)(grads)
    first, second, third, fourth = transport.receiver(StageMessage(I0, 0))()
    assert first is grads[0]
    assert (second, fourth) == (None, None)
    assert third is not None
    assert torch.equal(third, torch.zeros(1, 2, dtype=torch.bfloat16))
    grads[3] = torch.ones(4)
    with pytest.raises(PipelineError, match=r"^there is a gradient of input 3 of stage 1 in micro"):
        transport.sender(I0)(grads)


@pytest.mark.parametrize(
    ("result", "tensors", "text"),
    [
        (
            F0,
            [torch.zeros(3)],
            "output 0 of stage 0 in microbatch 0 is float32[3], but float32[2] ",
        ),
        (F0, [torch.zeros(2).double()], "is float64[2], but float32[2] was agreed on"),
        (F0, [], "stage 0 returned 0 tensors for microbatch 0, but 1 were agreed on"),
        (F0, [torch.zeros(2)] * 2, "stage 0 returned 2 tensors for microbatch 0, but 1 were"),
        (
            I0,
            [torch.zeros(1, 2)],
            "gradient of input 0 of stage 1 in microbatch 0 is float32[1, ",
        ),
        (I0, [], "stage 1 returned 0 input gradients for microbatch 0; expected one for each of"),
    ],
)
def test_tensors_unlike_the_agreed_ones_are_refused(
    result: Action, tensors: list[Tensor | None], text: str
) -> None:
    transport = _transport(_meta(2))
    with pytest.raises(PipelineError) as caught:
        transport.sender(result)(tensors)
    assert text in str(caught.value)
