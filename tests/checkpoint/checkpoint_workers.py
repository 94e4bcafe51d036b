"""Training runs that save and load, for spawned processes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.planner.meta_model import materialise_stage
from autosplit.trainer.stage_modules import Holder
from autosplit.trainer.trainer import PipelineTrainer
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.tables import chain_of
from tests.pipeline.trainer_options import grouped

VOCABULARY, WIDTH, LAYERS = 13, 8, 6


def whole(seed: int = 0) -> nn.Sequential:
    """Six modules in a chain; the first and the last share their weight."""
    torch.manual_seed(seed)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS - 3)),
        nn.BatchNorm1d(WIDTH),
        head,
    )
    head.weight = model[0].weight
    return model


def dropping(seed: int = 0) -> nn.Sequential:
    """The same with random layers."""
    model = whole(seed)
    for index in range(1, LAYERS - 2):
        model[index].append(nn.Dropout(0.3))
    return model


class Part(nn.Module):
    """Copies of some modules of the chain, under the names that they have in the whole."""

    def __init__(self, model: nn.Sequential, modules: range) -> None:
        super().__init__()
        done: dict[int, Any] = {}  # keeps tied weights tied
        for index in modules:
            self.add_module(str(index), copy.deepcopy(model[index], done))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


class Chain:
    """The model cut into stages."""

    def __init__(self, model: nn.Sequential, stages: int, values: Any = None) -> None:
        self._model = model
        self._values = values
        self.stages = stages
        bounds = [LAYERS * index // stages for index in range(stages + 1)]
        self._ranges = [range(*bounds[i : i + 2]) for i in range(stages)]
        self.wiring = chain_of([1] * (stages - 1))
        tied: list[Holder] = [(0, "0.weight"), (stages - 1, f"{LAYERS - 1}.weight")]
        self.shared = [tied] if stages > 1 else []

    def build(self, index: int) -> nn.Module:
        return materialise_stage(Part(self._model, self._ranges[index]), self._values)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Weights and biases have other options."""
    matrices = [p for p in parameters if p.dim() > 1]
    remaining = [p for p in parameters if p.dim() == 1]
    groups = [{"params": group, "lr": lr} for group, lr in ((matrices, 1e-2), (remaining, 3e-2))]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def trainer(model: nn.Sequential, stages: int, **options: Any) -> PipelineTrainer:
    cut = Chain(model, stages, options.pop("values", None))
    options = {"microbatches": 2, "timeout": 30.0, "stage_factory": ReferenceStage, **options}
    optimizer_fn = options.pop("optimizer_fn", adam)
    return PipelineTrainer(
        cut,
        F.cross_entropy,
        optimizer_fn,
        **grouped(**options),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    built = torch.randint(VOCABULARY, (2, 8), generator=generator)
    return built[0], built[1]


def train(engine: PipelineTrainer, first: int, last: int) -> Tensor:
    """The losses of steps ``first`` up to but not ``last``."""
    return torch.stack([engine.step(batch(step)) for step in range(first, last)])


def named(engine: PipelineTrainer) -> dict[str, Tensor]:
    """This rank's tensors by name."""
    return {
        name: value.clone()
        for state in engine.state_dict().values()
        for name, value in state.items()
    }
