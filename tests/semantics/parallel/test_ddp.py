"""DistributedDataParallel around a split module: a backward that synchronises is a whole one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autosplit
from autosplit.dynamo.backend import SplittingBackend
from autosplit.dynamo.pending_weights import Deferral
from tests.ranks import ranks


class Broken(nn.Sequential):
    """No single graph holds it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self[1](self[0](x))
        torch._dynamo.graph_break()
        return self[2](h)


class Sometimes(nn.Sequential):
    """Uses its last layer for some inputs only."""

    def forward(self, x: Tensor, last: bool = True) -> Tensor:
        h = self[1](self[0](x))
        return self[2](h) if last else h


class Compiled:
    """A module under ``torch.compile(backend="autosplit")``, with the face of a split one."""

    def __init__(self, model: nn.Module) -> None:
        self.module = torch.compile(model, backend=SplittingBackend())
        self.deferral = Deferral(model)

    @property
    def pending(self) -> int:
        return self.deferral.pending

    def backward_weight(self, microbatches: int | None = None) -> None:
        self.deferral.backward_weight(microbatches)


def models(kind: type[nn.Sequential] = nn.Sequential) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, copy.deepcopy(model)


PATTERNS = ("every microbatch", "all at once", "no_sync, weights inside", "no_sync, weights late")


WAYS = ("whole", "parts", "compiled")


@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_same_as_without_splitting(way: str) -> dict[str, list[float]]:
    torch._dynamo.reset()
    return {pattern: found for pattern, found in errors(way).items() if max(found) >= 1e-6}


def errors(way: str) -> dict[str, list[float]]:
    """Difference of every gradient from plain DistributedDataParallel, after two steps of each
    pattern, one pattern after the other.
    """
    model, plain = models(nn.Sequential if way == "whole" else Broken)
    split = Compiled(model) if way == "compiled" else autosplit.split(model)
    wrapped = DistributedDataParallel(split.module if way == "compiled" else split)
    reference = DistributedDataParallel(plain)
    torch.manual_seed(10 + dist.get_rank())
    batches = [torch.randn(3, 4) for _ in range(4)]
    found = {}
    for pattern in PATTERNS:
        for module in (wrapped, reference):
            module.zero_grad()
            for _ in range(2):
                _step(pattern, module, batches, split)
        grads = zip(model.parameters(), plain.parameters(), strict=True)
        found[pattern] = [(mine.grad - other.grad).abs().max().item() for mine, other in grads]
    return found


def _step(pattern: str, module: nn.Module, batches: list[Tensor], split: Any) -> None:
    count = 3 if pattern.startswith("no_sync") else 0
    if count:
        with module.no_sync():
            for batch in batches[:count]:
                module(batch).square().mean().backward()
            if pattern == "no_sync, weights inside":
                split.backward_weight()
    for batch in batches[count:]:
        module(batch).square().mean().backward()
        if pattern == "every microbatch":
            split.backward_weight()
    assert split.pending == 0
    split.backward_weight()


OPTIONS = (
    "",
    "find_unused_parameters",
    "static_graph",
    "static_graph, then no_sync",
    "gradient_as_bucket_view",
)


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2)
def test_same_under_every_option(option: str) -> list[float]:
    """Also where a parameter is unused in a step, and without a call that computes weights."""
    return [each for each in differences(option) if each >= 1e-6]


def differences(option: str) -> list[float]:
    """Of every parameter after three steps of AdamW, one call of ours nowhere: no
    ``backward_weight()``. One rank alone looks at gradients before all of them meet elsewhere.
    """
    model, plain = models(Sometimes)
    options = {option.partition(",")[0]: True} if option else {}
    torch.manual_seed(10 + dist.get_rank())
    batches = [torch.randn(3, 4) for _ in range(3)]
    trained = []
    for module in (autosplit.split(model), plain):
        wrapped = DistributedDataParallel(module, **options)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            last = option != "find_unused_parameters" or step == 1
            # The first step of a static graph is the one that torch records.
            if not option.startswith("static_graph") or ("no_sync" in option and step):
                with wrapped.no_sync():
                    wrapped(batches[0], last).square().mean().backward()
            loss = wrapped(batches[step], last).square().mean()
            loss.backward()
            if dist.get_rank() == 0:
                assert model[0].weight.grad is None or model[0].weight.grad.norm() > 0
            dist.all_reduce(loss.detach())
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            optimizer.step()
        trained.append([each.detach() for each in wrapped.parameters()])
    return [(a - b).abs().max().item() for a, b in zip(*trained, strict=True)]
