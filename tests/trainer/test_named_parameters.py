"""Optimizers of parameters with their names in the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit.pipeline import PipelineTrainer, StageOptions
from tests.kept_ranks import ranks


def without_decay_of_biases(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    decayed = [parameter for name, parameter in named if not name.endswith("bias")]
    others = [parameter for name, parameter in named if name.endswith("bias")]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.5}]
    return torch.optim.SGD(groups, lr=0.1, weight_decay=0.1)


def test_groups_by_name_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.randn(4, 4), torch.randn(4, 4)
    copy = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    copy.load_state_dict(model.state_dict())
    optimizer = without_decay_of_biases([*copy.named_parameters()])
    nn.functional.mse_loss(copy(batch[0]), batch[1]).backward()
    optimizer.step()
    with PipelineTrainer(
        [*model], nn.functional.mse_loss, without_decay_of_biases, microbatches=1, ranks=1
    ) as trainer:
        trainer.step(batch)
        rates = trainer.metrics()
    assert (rates["lr/0"], rates["lr/1"]) == (0.1, 0.5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, copy.get_parameter(name)), name


@pytest.mark.parametrize("whole", [True, False])
def test_names_are_those_of_the_whole_model(whole: bool) -> None:
    names: list[str] = []

    def named_only(named_parameters: list[Any]) -> torch.optim.Optimizer:
        names.extend(name for name, _ in named_parameters)
        return torch.optim.AdamW(named_parameters)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options: dict[str, Any] = {"stages": 2, "example": torch.ones(1, 4)} if whole else {}
    with PipelineTrainer(
        model if whole else [*model],
        nn.functional.mse_loss,
        named_only,
        microbatches=2,
        ranks=1,
        **options,
    ):
        assert names == [name for name, _ in model.named_parameters()]


class TiedEnds(nn.Module):
    """An embedding and a head with one weight, of which the head is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.embed = nn.Linear(4, 8, bias=False), nn.Embedding(8, 4)
        self.embed.weight = self.head.weight
        self.middle = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embed(ids))))


@pytest.mark.parametrize("whole", [True, False])
@ranks(2)
def test_a_tied_parameter_has_its_first_name_on_all_ranks(whole: bool) -> None:
    """Groups by name would otherwise differ between the stages that have it."""
    torch.manual_seed(0)
    model: Any = TiedEnds()
    ids = torch.arange(8)
    stages = nn.Sequential(model.embed, nn.Sequential(model.middle, nn.Tanh(), model.head))
    expected = {name for name, _ in (model if whole else stages).named_parameters()}
    first = "head.weight" if whole else "0.weight"
    names: list[str] = []

    def named_only(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        names.extend(name for name, _ in named)
        decayed = [parameter for name, parameter in named if name == first]
        undecayed = [parameter for name, parameter in named if name != first]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed}]
        return torch.optim.SGD(groups, lr=0.1)

    options: dict[str, Any] = (
        {
            "stages": 2,
            "example": ids[:4],
            "stage_options": StageOptions(planning={"cut_at": ["middle"]}),
        }
        if whole
        else {}
    )
    with PipelineTrainer(
        model if whole else [*stages],
        nn.functional.cross_entropy,
        named_only,
        microbatches=2,
        **options,
    ):
        assert first in names
        assert {*names} <= expected
