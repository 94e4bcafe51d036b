"""What one rank does in test_ddp.py."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autosplit
from autosplit.integrations.deferral import Deferral
from autosplit.integrations.dynamo import Backend


class Broken(nn.Sequential):
    """No single graph holds it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self[1](self[0](x))
        torch._dynamo.graph_break()
        return self[2](h)


class Compiled:
    """A module under ``torch.compile(backend="autosplit")``, with the face of a split one."""

    def __init__(self, model: nn.Module) -> None:
        self.module = torch.compile(model, backend=Backend())
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


def all_errors() -> dict[tuple[str, str], list[float]]:
    """Way and pattern -> errors of every gradient. One launch for all: it takes seconds."""
    found = {}
    for way, pattern in itertools.product(WAYS, PATTERNS):
        torch._dynamo.reset()
        found[way, pattern] = errors(pattern, way)
    return found


def errors(pattern: str, way: str) -> list[float]:
    """Difference of every gradient from plain DistributedDataParallel, after two steps."""
    model, plain = models(nn.Sequential if way == "whole" else Broken)
    split = Compiled(model) if way == "compiled" else autosplit.split(model)
    wrapped = DistributedDataParallel(split.module if way == "compiled" else split)
    reference = DistributedDataParallel(plain)
    torch.manual_seed(10 + dist.get_rank())
    batches = [torch.randn(3, 4) for _ in range(4)]
    for _ in range(2):
        for module in (wrapped, reference):
            _step(pattern, module, batches, split)
    grads = zip(model.parameters(), plain.parameters(), strict=True)
    return [(mine.grad - theirs.grad).abs().max().item() for mine, theirs in grads]


def _step(pattern: str, module: nn.Module, batches: list[Tensor], split: Any) -> None:
    count = 3 if pattern.startswith("no_sync") else 0
    if count:
        with module.no_sync():
            for batch in batches[:count]:
                module(batch).square().mean().backward()
            if pattern == "no_sync, weights inside" and split.pending:
                split.backward_weight()
    for batch in batches[count:] if pattern != "every microbatch" else batches:
        module(batch).square().mean().backward()
        if pattern == "every microbatch" and split.pending:
            split.backward_weight()
    if split.pending:
        split.backward_weight()


def refusals(*options: str) -> list[str]:
    return [refusal(option) for option in options]


def refusal(option: str) -> str:
    model, _ = models()
    split = autosplit.split(model)
    options = {option: True} if option in ("find_unused_parameters", "static_graph") else {}
    wrapped = DistributedDataParallel(split, **options)
    try:
        with wrapped.no_sync():
            wrapped(torch.randn(3, 4)).sum().backward()
        output = wrapped(torch.randn(3, 4))
        if option == "count":
            output.sum().backward()
            split.backward_weight(microbatches=1)
        split.backward_weight()
    except autosplit.SplitError as error:
        return str(error)
    return "nothing was refused"
