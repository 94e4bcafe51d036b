"""What one rank does in test_ddp.py."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autosplit


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, copy.deepcopy(model)


def errors(pattern: str) -> list[float]:
    """Difference of every gradient from plain DistributedDataParallel, after two steps."""
    model, plain = models()
    split = autosplit.split(model)
    wrapped, reference = DistributedDataParallel(split), DistributedDataParallel(plain)
    torch.manual_seed(10 + dist.get_rank())
    batches = [torch.randn(3, 4) for _ in range(4)]
    for _ in range(2):
        for module in (wrapped, reference):
            _step(pattern, module, batches, split)
    grads = zip(model.parameters(), plain.parameters(), strict=True)
    return [(mine.grad - theirs.grad).abs().max().item() for mine, theirs in grads]


def _step(pattern: str, module: nn.Module, batches: list[Tensor], split: nn.Module) -> None:
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
