"""One rank's loop over its actions: what is asked of stages, and what passes through it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import Stage
from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.boundaries import Boundaries
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.timing import SpanRecorder
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.routes import routes_of
from autosplit.ranks.first_error import LostPeerError
from autosplit.ranks.groups import Groups
from autosplit.runtime.functions import SplitFunctions

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


def executor(stages: dict[int, Any], count: int, **schedule_options: Any) -> Executor:
    options = {"microbatches": 1, "ranks": 1, **schedule_options}
    schedule, groups = build("gpipe", count, **options), Groups(1, CPU, 1.0)
    transport = Transport(routes_of(schedule)[0], groups, device=CPU, posts={})
    return Executor(stages, schedule, 0, transport)


def test_a_lost_peer_is_passed_on_as_it_is_and_there_is_no_autograd_inside() -> None:
    stage = Forwards()
    with pytest.raises(LostPeerError, match=r"^lost rank 1\nMore: "):
        executor({0: stage}, 1).run([[torch.ones(2)]], [[]], [Boundaries()])
    assert stage.modes == [False]
    assert torch.is_grad_enabled()


def test_stages_must_fit_the_schedule() -> None:
    with pytest.raises(PipelineError, match=r"1F0 is scheduled on rank 0, which has stages \[0"):
        executor({0: Forwards()}, 2)
    with pytest.raises(PipelineError, match="stage 1 has no backward"):
        executor({0: Forwards(), 1: NoBackward()}, 2)


class SquaredError(nn.Module):
    """A stage with its loss. Its gradients are too large to be added after the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 600), nn.Tanh(), nn.Linear(600, 4)).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()


def test_weight_gradients_that_follow_each_other_are_one_call_of_a_stage_that_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[int] = []

    def joined_weight(functions: SplitFunctions, deferred: list[Any], *sums: Any) -> Any:
        joined.append(len(deferred))
        return original(functions, deferred, *sums)

    original = SplitFunctions.joined_weight
    monkeypatch.setattr(SplitFunctions, "joined_weight", joined_weight)
    torch.manual_seed(0)
    model, count = SquaredError(), 5
    inputs = [[torch.randn(3, 512, dtype=torch.float64)] for _ in range(count)]
    targets = [[torch.randn(3, 4, dtype=torch.float64)] for _ in range(count)]
    gradients = {}
    for accumulation in ("exact", "auto"):
        stage = Stage(model, [*inputs[0], *targets[0]], accumulation=accumulation)
        recorder = SpanRecorder(0)
        run = executor({0: stage}, 1, microbatches=count, weights="2bp").run
        loss_grads: list[Any] = [[torch.ones((), dtype=torch.float64)]] * count
        losses = run(inputs, targets, [Boundaries()] * count, recorder, loss_grads)
        gradients[accumulation] = stage.gradients
        assert [*losses] == [*range(count)]
        spans = [span for span in recorder.spans() if str(span.action).startswith("0W")]
        assert [span.action.microbatch for span in spans] == [*range(count)]
        assert all(early.end <= late.start for early, late in pairwise(spans))
    assert joined == [count]
    for name, exact in gradients["exact"].items():
        allowed = 1e-12 * float(exact.abs().max())
        torch.testing.assert_close(gradients["auto"][name], exact, rtol=0.0, atol=allowed)
