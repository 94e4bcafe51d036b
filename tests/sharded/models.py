"""A small language model, and ways to shard it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.zoo import Residual

WORDS, WIDTH = 13, 8


class Block(Residual):
    """An MLP with a residual; neither its inner width nor its one scale divide by two ranks."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2 * WIDTH + 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Model(nn.Module):
    """Embedding, blocks and head; it counts its calls in place."""

    def __init__(self, *, tied: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        built: Tensor = self.head(self.norm(x))
        return built * 1  # FSDP warns of views


Shard = Callable[[nn.Module], nn.Module]


def sharded(model: Any, **options: Any) -> nn.Module:
    """A group for each block and one for the rest."""
    for block in model.blocks:
        fully_shard(block, **options)
    module: nn.Module = fully_shard(model, **options)
    return module


def blocks_only(model: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    module: nn.Module = model
    return module


def last_together(model: Any) -> nn.Module:
    """Norm and head in one group."""
    fully_shard([model.norm, model.head])
    return sharded(model, reshard_after_forward=True)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WHOLE_OUTSIDE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


def half_inside(model: Any) -> nn.Module:
    """Blocks that reduce in float32, the rest in bfloat16."""
    for block in model.blocks:
        fully_shard(block, mp_policy=HALF)
    module: nn.Module = fully_shard(model, mp_policy=WHOLE_OUTSIDE)
    return module


def half_frozen(model: Any) -> nn.Module:
    model.blocks[0].requires_grad_(False)
    return sharded(model)
