"""A model whose stages' tensors ranks share, however it is cut, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from autosplit.pipeline import PipelineTrainer
from tests.mesh.workers import Names, trainer

WIDTH, ROWS, LENGTH, WORDS = 4, 8, 4, 8
Build = Callable[[int], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(self.dropout(self.up(self.norm(x)).tanh()))
        return output


def stage_of(index: int, stages: int, count: int = 2) -> nn.Sequential:
    """Stage ``index`` of a model of so many blocks that is the same however it is cut, in one
    process.
    """
    blocks = []
    for number in range(index * count // stages, (index + 1) * count // stages):
        torch.manual_seed(number)
        blocks.append(Block())
    if index == stages - 1:
        blocks.append(nn.Linear(WIDTH, WORDS, bias=False))
    return nn.Sequential(*blocks)


def named(stages: int, count: int = 2) -> Names:
    """The names of stages' parameters in the whole model."""

    def name(stage: int, own: str) -> str:
        at, _, rest = own.partition(".")
        return f"{int(at) + stage * count // stages}.{rest}"

    return name


def parallel(mesh: DeviceMesh, stages: int, count: int = 2) -> Build:
    """The same with its tensors shared: activations between the products lie along the sequence,
    also where they go from stage to stage, and the logits along the words.
    """

    def build(index: int) -> nn.Module:
        module = stage_of(index, stages, count)
        plan: dict[str, Any] = {}
        for at, part in enumerate(module):
            if isinstance(part, Block):
                plan |= {
                    f"{at}.norm": SequenceParallel(),
                    f"{at}.up": ColwiseParallel(input_layouts=Shard(1)),
                    f"{at}.down": RowwiseParallel(output_layouts=Shard(1)),
                }
            else:
                plan[str(at)] = ColwiseParallel(
                    input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
                )
        result = parallelize_module(module, mesh["tp"], plan)
        if index:
            return result
        whole = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        return parallelize_module(result, mesh["tp"], whole)

    return build


def still(build: Build) -> Build:
    """Without dropout."""
    return lambda index: build(index).eval()


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def batch(replica: int = 0, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(10 * step + replica)
    inputs = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    return inputs, torch.randint(WORDS, (ROWS, LENGTH), generator=generator)


def of_words(mesh: DeviceMesh | None, stages: int, build: Build, **options: Any) -> PipelineTrainer:
    options = {"max_grad_norm": 1e9, "loss_fn": loss_of, **options}
    return trainer(mesh, build, stages, **options)
