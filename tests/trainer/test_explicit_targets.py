"""``target=None`` says that a rank has no targets. Two inputs beside it are no batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import PipelineTrainer
from tests.kept_ranks import ranks


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        output: Tensor = self.linear(x)
        return output if mask is None else output * mask


@ranks(2)
def test_a_rank_without_targets_passes_none() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Masked(), nn.Linear(4, 4))
    x, mask, y = torch.randn(4, 4), torch.tensor([[1.0, 0, 1, 0]]).repeat(4, 1), torch.ones(4, 4)
    losses = [
        F.mse_loss(model[1](model[0](*rows)), target)
        for *rows, target in zip(x.chunk(2), mask.chunk(2), y.chunk(2), strict=True)
    ]
    with PipelineTrainer(
        [*model], F.mse_loss, torch.optim.SGD, stages=2, microbatches=2
    ) as trainer:
        for call in (trainer.evaluate, trainer.step):
            is_first = dist.get_rank() == 0
            results = call((x, mask), target=None) if is_first else call(None, target=y)
            assert results.tolist() == [loss.item() for loss in losses]
