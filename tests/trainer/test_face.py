"""A trainer cuts a whole model for what it runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import partition
from autosplit.errors import PipelineError, ScheduleError
from autosplit.pipeline import PipelineTrainer, StageOptions, build
from tests.kept_ranks import Ranks
from tests.pipeline import workers
from tests.planner.planned_models import UNEVEN, cut_by_trainers, loss, net, sgd, tokens

CASES: dict[str, tuple[dict[str, Any], int]] = {
    "1f1b": ({}, 2),
    "microbatches": ({"microbatches": 8}, 1),
    "schedule": ({"schedule": "gpipe"}, 1),
    "memory_limit": ({"schedule": "gpipe", "memory_limit": 45}, 2),
    "fused": ({"split_backward": False}, 3),
    "a schedule": ({"schedule": build("1f1b", 2, 2, split_backward=False)}, 3),
    "cut_at": ({"planning": {"costs": UNEVEN, "cut_at": ["layers.3"]}}, 3),
}


def trainer(**options: Any) -> PipelineTrainer:
    inputs = {"loss_fn": loss, "optimizer_fn": sgd, "example": tokens(), "ranks": 1}
    return workers.trainer(net(), microbatches=2, **{**inputs, "stage_factory": None, **options})


def test_cuts_are_those_for_the_schedule_that_runs(on_ranks: Ranks) -> None:
    cases = {name: options for name, (options, _) in CASES.items()}
    for rank in on_ranks(cut_by_trainers, 2, (cases,), timeout=100.0):
        assert rank == {name: layers for name, (_, layers) in CASES.items()}


def test_the_schedule_is_built_for_the_stages_that_are_cut() -> None:
    with trainer(planning={"costs": UNEVEN}) as engine:
        plan = partition(net(), tokens(), stages=2, microbatches=2, ranks=1, costs=UNEVEN)
        assert engine.schedule == plan.schedule
    with trainer(planning={"costs": UNEVEN}, schedule="auto") as engine:
        assert engine.schedule.name == "zb-v"


class WithStates(nn.Module):
    """Returns the outputs of all layers, if asked, beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor, output_hidden_states: bool = False) -> Any:
        states = [self.embed(ids)]
        for layer in self.layers:
            states.append(torch.tanh(layer(states[-1])))
        loss = F.cross_entropy(self.head(states[-1]).flatten(0, 1), labels.flatten())
        return {"loss": loss, "states": states} if output_hidden_states else {"loss": loss}


def test_a_model_that_puts_out_its_hidden_states() -> None:
    """They go from their stages to the last, and gradients back."""
    torch.manual_seed(0)
    model = WithStates()
    batch = dict(zip(("ids", "labels"), torch.randint(9, (2, 2, 8)), strict=True))
    example = {**batch, "output_hidden_states": True}

    def loss_fn(output: Any, targets: Any) -> Tensor:
        states = [state.square().mean() for state in output["states"]]
        return torch.stack([output["loss"], *states]).sum()

    expected = copy.deepcopy(model)
    loss_fn(expected(**example), ()).backward()
    with PipelineTrainer(
        model,
        loss_fn,
        sgd,
        stages=2,
        example=example,
        microbatches=1,
        ranks=1,
        stage_options=StageOptions(planning={"costs": "estimate", "cut_at": ["layers.1"]}),
    ) as engine:
        engine.forward_backward((batch, ()))
        for module in engine.modules.values():
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter.grad, expected.get_parameter(name).grad), name


def test_invalid_options_of_planning_are_refused() -> None:
    with pytest.raises(PipelineError, match="unknown option 'cost' in planning; known: costs, sec"):
        trainer(planning={"cost": "estimate"})
    with pytest.raises(PipelineError, match="planning has no effect with stages: it is for a wh"):
        PipelineTrainer(
            [net()],
            loss,
            sgd,
            microbatches=1,
            ranks=1,
            stage_options=StageOptions(planning={}),
        )
    other = build("1f1b", 2, 4)
    with pytest.raises(ScheduleError, match=r"= \(2, 4\), but the request is for \(2, 2\)"):
        partition(net(), tokens(), stages=2, microbatches=2, schedule=other, costs=UNEVEN)
    with pytest.raises(ScheduleError, match="has 2 ranks, but ranks=1"):
        partition(net(), tokens(), stages=2, microbatches=4, schedule=other, ranks=1, costs=UNEVEN)
    with pytest.raises(ScheduleError, match="no effect beside the schedule '1f1b'"):
        partition(net(), tokens(), stages=2, schedule=other, weights="2bp", costs=UNEVEN)
