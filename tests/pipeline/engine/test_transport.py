"""Messages between two real ranks, and hand-over within one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.boundaries import Negotiation, TensorMeta
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.routes import Parcel, routes_of
from tests.pipeline.engine import transport_workers
from tests.ranks import Ranks

CPU = torch.device("cpu")
F0, I0 = Action.parse("0F0"), Action.parse("1I0")


@pytest.fixture(scope="module")
def found(on_ranks: Ranks) -> list[dict[str, Any]]:
    return on_ranks(transport_workers.everything, 2, timeout=90)


def test_what_was_sent_is_let_go_as_soon_as_a_message_proves_it(found: list[Any]) -> None:
    """1F1B, 8 microbatches: never more than the schedule has under way, never all of them."""
    assert max(found[0]["alive"]) <= 2
    assert max(found[1]["alive"]) <= 2
    assert len(found[0]["alive"]) == len(found[1]["alive"]) == 8


@pytest.mark.parametrize(
    ("prefetch", "posted"), [(0, [0, 1]), (1, [1, 2]), (2, [2, 3]), (9, [4, 4])]
)
def test_receives_are_posted_ahead(found: list[Any], prefetch: int, posted: list[int]) -> None:
    assert found[1]["posted"][prefetch] == posted


def test_shapes_are_learned_from_the_first_message(found: list[Any]) -> None:
    assert found[1]["learned"] == {0: [("float32[3]", False), ("int64[2]", False)]}
    assert found[1]["values"] == [[0.0, 0.0, 0.0], [7, 7]]


def test_tensors_travel_as_bytes_whatever_they_hold(found: list[Any]) -> None:
    """NCCL (of torch 2.13) sends neither int16 nor complex64."""
    assert all(found[0]["kinds"])
    assert all(found[1]["kinds"])
    assert len(found[1]["kinds"]) == 16


def test_negotiation_brings_everything_that_matters(found: list[Any]) -> None:
    meta = TensorMeta(torch.Size([4, 0]), torch.bfloat16, True)
    assert found[0]["negotiated"] == found[1]["negotiated"] == (meta, meta)


def test_a_stage_that_is_never_built_ends_the_wait(found: list[Any]) -> None:
    assert "waited 0.2 s for stage 0 to be built" in found[1]["never"]


def test_connections_end_when_a_trainer_is_closed(found: list[dict[str, Any]]) -> None:
    """Not when the garbage collector comes, which would hold up whatever runs then."""
    assert [each["ended"] for each in found] == [
        (True, "this trainer was closed: build a new one")
    ] * 2


# --- on one rank --------------------------------------------------------------------------


def _transport(*metas: TensorMeta, prefetch: int = 2) -> Transport:
    groups = Groups(1, CPU, 1.0)
    negotiation = Negotiation("train", groups, lambda: None)
    negotiation.publish(0, metas)
    routes = routes_of(build("gpipe", 2, 1, ranks=1), 0)
    return Transport(routes, groups, negotiation, device=CPU, prefetch=prefetch)


def _meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> TensorMeta:
    return TensorMeta(torch.Size(shape), dtype, grad)


def test_hand_over_keeps_the_tensors() -> None:
    transport = _transport(_meta(2), _meta(3, dtype=torch.int64, grad=False))
    tensors = [torch.zeros(2), torch.zeros(3, dtype=torch.int64)]
    transport.sender(F0)(tensors)
    received = transport.receiver(Parcel(F0, 1))()
    assert all(a is b for a, b in zip(received, tensors, strict=True))
    with pytest.raises(KeyError):
        transport.receiver(Parcel(F0, 1))()


def test_only_wanted_gradients_come_back_and_missing_ones_are_zero() -> None:
    transport = _transport(_meta(2), _meta(3, grad=False), _meta(1, 2, dtype=torch.bfloat16))
    grads: list[Tensor | None] = [torch.ones(2), torch.ones(3), None, torch.ones(5)]
    transport.sender(I0)(grads)
    first, second, third = transport.receiver(Parcel(I0, 0))()
    assert first is grads[0]
    assert second is None
    assert third is not None
    assert torch.equal(third, torch.zeros(1, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("result", "tensors", "text"),
    [
        (
            F0,
            [torch.zeros(3)],
            "output 0 of stage 0 in microbatch 0 is float32[3], but float32[2] ",
        ),
        (F0, [torch.zeros(2).double()], "is float64[2], but float32[2] was agreed on"),
        (F0, [], "stage 0 put out 0 tensors for microbatch 0, but 1 were agreed on"),
        (F0, [torch.zeros(2)] * 2, "stage 0 put out 2 tensors for microbatch 0, but 1 were"),
        (
            I0,
            [torch.zeros(1, 2)],
            "gradient of input 0 of stage 1 in microbatch 0 is float32[1, ",
        ),
        (I0, [], "stage 1 gave 0 input gradients for microbatch 0; expected one for each of its"),
    ],
)
def test_what_was_not_agreed_on_is_refused(
    result: Action, tensors: list[Tensor | None], text: str
) -> None:
    transport = _transport(_meta(2))
    with pytest.raises(PipelineError) as caught:
        transport.sender(result)(tensors)
    assert text in str(caught.value)
