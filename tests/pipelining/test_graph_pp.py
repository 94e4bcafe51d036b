"""Our graphs behind torchtitan's protocol: called as its runner calls them, and by it."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.pipeline import launch
from autosplit.pipelining.graph_pp import SplitGraphProvider, SplitStageGraphs

from .graph_pp_workers import differences
from .programs import block, mean_square

Flat = list[Any]


class Chain:
    """Stages one after another on one rank, driven as ``GraphPipelineRuntime`` drives them: values
    are kept and gradients added up here."""

    def __init__(self, parts: list[nn.Module]) -> None:
        provider = SplitGraphProvider(weighted)
        self.stages = [
            SimpleNamespace(
                graphs=None, submod=part, stage_index=at, is_last=at == len(parts) - 1,
            )
            for at, part in enumerate(parts)
        ]  # fmt: skip
        for stage in self.stages:
            stage.set_graphs = lambda graphs, stage=stage: setattr(stage, "graphs", graphs)
        schedule = SimpleNamespace(_stages=self.stages)
        self.overlaps = provider.prepare_graphs(schedule, None, loss_kwargs={})
        self.graphs: list[SplitStageGraphs] = [stage.graphs for stage in self.stages]
        self.grads: list[Flat] = [
            [None] * graphs.num_unsharded_param_grad_values for graphs in self.graphs
        ]

    def values(self, at: int) -> dict[str, Flat]:
        module = self.stages[at].submod
        held = [p for _, p in module.named_parameters(remove_duplicate=False)]
        return {
            "unsharded_param_values": self.graphs[at].unshard_params(held),
            "flat_buffer_values": [b for _, b in module.named_buffers(remove_duplicate=False)],
        }

    def forward(self, x: Tensor, target: Tensor) -> list[Any]:
        kept = []
        for at, graphs in enumerate(self.graphs):
            given = x if at == 0 else x.detach().requires_grad_()
            last = at == len(self.graphs) - 1
            x, saved = graphs.forward(
                (given,), {}, target if last else None, {"weight": 0.5}, **self.values(at)
            )
            kept.append(((x,), saved))
        return kept

    def add(self, at: int, grads: Flat) -> None:
        for place, grad in enumerate(grads):
            if grad is not None:
                before = self.grads[at][place]
                self.grads[at][place] = grad if before is None else before.add_(grad)

    def finish(self, at: int) -> None:
        graphs = self.graphs[at]
        found = graphs.param_grads_for_accumulation(graphs.reduce_grads(self.grads[at]))
        module = self.stages[at].submod
        trained = [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
        for parameter, grad in zip(trained, found, strict=True):
            if grad is not None:
                assert parameter.grad is None
                parameter.grad = grad


def weighted(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return weight * mean_square(output, target)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.two.weight = self.one.weight
        self.two.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.two(self.one(x).tanh()))
        return made


@pytest.mark.parametrize("way", ["whole", "apart", "overlapping"])
def test_gradients_are_those_of_plain_autograd(way: str) -> None:
    parts = [block(), Tied(), block()]
    plain = copy.deepcopy(parts)
    chain = Chain(parts)
    batches = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(3)]
    kept = [chain.forward(*batch) for batch in batches]
    for flight in kept:
        grads: tuple[Any, ...] = ()
        late = []
        for at in (2, 1, 0):
            output, saved = flight[at]
            graphs = chain.graphs[at]
            if way == "apart":
                found, deferred = graphs.backward_input(output, saved, grads)
                late.append((at, deferred))
            elif way == "whole":
                found, weights = graphs.full_backward(output, saved, grads)
                chain.add(at, weights)
            else:
                found, weights, _, _ = chain.overlaps[0, at].forward_backward(
                    backward_stage_output=output,
                    backward_saved_values_for_backward=saved,
                    output_grads_from_next=grads,
                    forward_args=(batches[0][0],),
                    forward_kwargs={},
                    forward_target=None,
                    forward_loss_kwargs={},
                    **{f"forward_{name}": value for name, value in chain.values(0).items()},
                )
                chain.add(at, weights)
            grads = tuple(found)
        for at, deferred in late:
            chain.add(at, chain.graphs[at].backward_weight(deferred))
    for at in range(3):
        chain.finish(at)
    for x, y in batches:
        weighted(plain[2](plain[1](plain[0](x))), y, 0.5).backward()
    for mine, other in zip(parts, plain, strict=True):
        for (name, one), two in zip(mine.named_parameters(), other.parameters(), strict=True):
            assert (one.grad is None) is (two.grad is None), name
            assert one.grad is None or torch.equal(one.grad, two.grad), name  # type: ignore[arg-type]
        for one, two in zip(mine.buffers(), other.buffers(), strict=True):
            assert torch.equal(one, two)


def test_without_a_target_the_last_stage_gives_its_output() -> None:
    chain = Chain([block(), block()])
    x = torch.randn(3, 4)
    with torch.no_grad():
        output, saved = chain.graphs[1].forward((x,), {}, None, {}, **chain.values(1))
    assert torch.equal(output, chain.stages[1].submod(x))
    assert saved == ()


def test_it_has_the_members_of_torchtitans_protocol() -> None:
    stage = pytest.importorskip(
        "torchtitan.experiments.graph_trainer.graph_pp.stage", exc_type=ImportError
    )
    for mine, protocol in (
        (SplitStageGraphs, stage.GraphPPStageGraphs),
        (SplitGraphProvider, stage.GraphPPStageGraphsProvider),
    ):
        members = {name for name in vars(protocol) if not name.startswith("_")}
        assert members <= set(dir(mine))


def test_torchtitans_runner_trains_with_our_graphs() -> None:
    """torchtitan is no dependency: run with torchtitan 0.3.0 on the path."""
    pytest.importorskip(
        "torchtitan.experiments.graph_trainer.graph_pp.runner", exc_type=ImportError
    )
    for found in launch(differences, 2, timeout=100):
        assert len(found) == 3
        assert [each for each in found.values() if each] == []
