"""The names of modules in a captured model, whichever way the forward reaches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import partition
from autosplit.planner.captured_model import WholeModel
from tests.planner.whole_models import Checkpointed


class Adapter(nn.Module):
    """Looks up what it has not in what it wraps, as the wrappers of peft do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_model(x)


class Held(nn.Module):
    """Reaches its layers through a list and another object beside their names."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"part {n}": layer() for n in range(3)})
        self.order = [self.parts[f"part {n}"] for n in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.order:
            x = part(x)
        return x


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("model", "cut"),
    [
        (Adapter(Adapter(nn.Sequential(layer(), layer()))), "base_model.base_model.1"),
        (Held(), "parts.part 1"),
        (nn.Sequential(layer(), layer()), "1"),
        (Checkpointed(), "layers.1"),
    ],
    ids=["wrapper", "list", "plain", "checkpointed"],
)
def test_blocks_have_the_names_of_the_models_modules(model: nn.Module, cut: str) -> None:
    inputs = torch.randn(2, next(model.parameters()).shape[1])
    whole = WholeModel.capture(model, inputs)
    names = dict(model.named_modules())
    assert [b.name for b in whole.blocks if b.name.partition(":")[0] not in names] == []
    assert cut in {block.name for block in whole.blocks}
    plan = partition(model, inputs, cut_at=[cut], costs="estimate", ranks=1)
    assert plan.cuts == (cut,)
    kept = {name for stage in range(2) for name, _ in plan.build(stage).named_parameters()}
    assert kept == {name for name, _ in model.named_parameters()}
