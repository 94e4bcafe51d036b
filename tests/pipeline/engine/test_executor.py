"""One rank's loop over its actions: what is asked of stages, and what passes through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.boundaries import Boundaries
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.routes import routes_of
from autosplit.ranks.first_error import LostPeerError
from autosplit.ranks.groups import Groups

CPU = torch.device("cpu")


class Forwards:
    """A stage that only runs forward."""

    def __init__(self) -> None:
        self.modes: list[bool] = []

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        self.modes.append(torch.is_grad_enabled())
        raise LostPeerError("lost rank 1")

    def backward_input(self, microbatch: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        return []

    backward = backward_input

    def backward_weight(self, microbatch: int) -> None:
        pass


class NoBackward:
    forward = Forwards.forward


def executor(stages: dict[int, Any], count: int) -> Executor:
    schedule, groups = build("gpipe", count, 1, ranks=1), Groups(1, CPU, 1.0)
    boundaries = Boundaries()
    boundaries.outputs |= dict.fromkeys(range(count), ())
    transport = Transport(routes_of(schedule)[0], groups, boundaries, device=CPU, posts={})
    return Executor(stages, schedule, 0, transport, loss_grad=torch.tensor(1.0))


def test_a_lost_peer_is_passed_on_as_it_is_and_there_is_no_autograd_inside() -> None:
    stage = Forwards()
    with pytest.raises(LostPeerError, match=r"^lost rank 1\nMore: "):
        executor({0: stage}, 1).run([[torch.ones(2)]], [[]])
    assert stage.modes == [False]
    assert torch.is_grad_enabled()


def test_stages_must_fit_the_schedule() -> None:
    with pytest.raises(PipelineError, match=r"1F0 is scheduled on rank 0, which has stages \[0"):
        executor({0: Forwards()}, 2)
    with pytest.raises(PipelineError, match="stage 1 has no backward"):
        executor({0: Forwards(), 1: NoBackward()}, 2)
