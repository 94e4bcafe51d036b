"""Limits of memory as users reach them: what a refusal advises, and what is left behind one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autosplit.errors import PipelineError
from autosplit.pipeline.trainer import PipelineTrainer
from tests.pipeline.ledger import workers
from tests.pipeline.trainer_options import grouped
from tests.ranks import ranks

MICROBATCHES = 2
SETTLED = 6  # steps


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def least(error: PipelineError) -> int:
    return int(re.findall(r"memory_limit=(\d+)", str(error))[0])


@ranks(2)
def test_the_limit_that_a_refusal_advises_is_kept() -> None:
    """On stages whose kernels take memory for themselves."""

    def limited(limit: int) -> PipelineTrainer:
        return workers.trainer(block=workers.Convolutions, memory_limit=limit)

    with pytest.raises(PipelineError) as caught, limited(1024) as refused:
        refused.step(workers.batch())
    advised = least(caught.value)
    with limited(advised) as made:
        for step in range(SETTLED):
            made.record = "memory" if step == SETTLED - 1 else False
            made.step(workers.batch())
        memory = made.memory()
    held = [*map(sum, zip(memory.peak_activations, memory.fixed, strict=True))]
    assert max(held) <= advised


def stages(**options: Any) -> PipelineTrainer:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return PipelineTrainer(
        [nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(2)],
        F.mse_loss,
        adam,
        microbatches=MICROBATCHES,
        **grouped(timeout=60.0, **options),
    )


@pytest.mark.parametrize("store", [5, "", b"/tmp"])
def test_a_store_that_is_no_folder(store: object) -> None:
    with pytest.raises(PipelineError, match="store is the folder for what is offl"):
        stages(store=store, memory_limit="1GiB", ranks=1)
