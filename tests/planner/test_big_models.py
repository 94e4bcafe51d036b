"""A model that nobody has in memory is cut, its stages filled, trained, saved and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosplit
from autosplit import PlanError
from autosplit.pipeline import PipelineTrainer
from autosplit.planner import Partition, WholeModel, cut
from autosplit.planner.meta_model import meta_model

WIDTH, ROWS = 8, 4


class Model(nn.Module):
    """Tied ends, a table that is in no checkpoint, positions made for the device of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer(
            "table", torch.arange(5.0 * WIDTH).view(5, WIDTH).cos(), persistent=False
        )
        with torch.no_grad():
            self.layers[2].weight.mul_(2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        places = torch.arange(x.shape[1], device=x.device)
        x = x + self.table[places]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x.mean(1)))


def tokens(seed: int) -> Tensor:
    return torch.randint(
        11, (ROWS, 5), generator=torch.Generator(torch.get_default_device()).manual_seed(seed)
    )


def partition(model: nn.Module, stages: int) -> Partition:
    whole = WholeModel.capture(model, (tokens(0)[: ROWS // 2],))
    count = len(whole.blocks)
    return cut(whole, [count * stage // stages for stage in range(1, stages)])


def trainer(cut_model: Partition, rate: float = 0.1) -> PipelineTrainer:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, rate, momentum=0.9)

    return PipelineTrainer(cut_model, F.cross_entropy, optimizer, microbatches=2, ranks=1)


def step(engine: PipelineTrainer, seed: int) -> Tensor:
    return engine.step((tokens(seed), tokens(seed)[:, 0]))


def named(engine: PipelineTrainer) -> dict[str, Tensor]:
    return {n: v.clone() for state in engine.state_dict().values() for n, v in state.items()}


def initialised(stages: int, **options: Any) -> Partition:
    result = partition(meta_model(Model), stages)
    result.initialise(**options)
    return result


def test_any_number_of_stages_starts_with_the_same_values() -> None:
    """And trains as the model that is not cut does."""
    results = []
    for stages in (1, 3):
        with trainer(initialised(stages, seed=3)) as engine:
            values = named(engine)
            results.append((values, [step(engine, seed) for seed in range(3)]))
            assert all(not p.is_meta for m in engine.modules.values() for p in m.parameters())
    (values, losses), *remaining = results
    for other, also in remaining:
        assert other.keys() == values.keys()
        assert all(torch.equal(other[name], values[name]) for name in values)
        assert torch.equal(also[0], losses[0])
        # Gradients of a tied parameter are summed in another order where it is in two stages.
        torch.testing.assert_close(torch.stack(also), torch.stack(losses))
    assert values["layers.2.weight"].abs().max() > 1.5 * values["layers.1.weight"].abs().max()
    plain = Model()
    plain.load_state_dict(values)
    expected = [F.cross_entropy(plain(x), x[:, 0]) for x in tokens(0).chunk(2)]
    torch.testing.assert_close(losses[0], torch.stack(expected))


def test_a_skeleton_needs_values() -> None:
    with pytest.raises(
        PlanError, match=r"embed\.weight.*on the meta device.*load_checkpoint\(trainer, path\)"
    ):
        partition(meta_model(Model), 2).build(0)


def test_a_plan_for_a_skeleton_runs() -> None:
    inputs = tokens(0)[: ROWS // 2]
    plan = autosplit.partition(
        meta_model(Model), inputs, stages=2, microbatches=2, costs="estimate"
    )
    plan.initialise(seed=3)
    values = named(trainer(initialised(3, seed=3)))
    for index in range(2):
        built = plan.build(index).state_dict()
        assert all(torch.equal(value, values[name]) for name, value in built.items())
