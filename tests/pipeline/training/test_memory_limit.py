"""Limits of memory as users reach them: what a refusal advises, and what is left behind one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.checkpoint import save_checkpoint
from autosplit.errors import PipelineError
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.stage import Stage
from tests.pipeline.ledger import workers
from tests.pipeline.trainer_options import grouped
from tests.pipeline.workers import equal
from tests.ranks import Ranks, ranks

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


class Hungry(Stage):
    """A stage whose forward takes memory that no graph tells of."""

    def forward(self, *args: Any, **options: Any) -> list[Tensor]:
        torch.empty(4_000_000, dtype=torch.uint8)
        return super().forward(*args, **options)


def vectors(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    one, other = torch.randn(2, 64 * MICROBATCHES, 48, generator=generator)
    return one.clone(), other.clone()


def stages(**options: Any) -> PipelineTrainer:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return PipelineTrainer(
        [nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(2)],
        F.mse_loss,
        adam,
        microbatches=MICROBATCHES,
        **grouped(timeout=60.0, **options),
    )


def refused_after_measuring(folder: Path) -> None:
    """Before the optimizer moves in that step: weights are those of the steps before it."""
    with stages(stage_factory=Hungry) as plain:
        plain.step(vectors(0))
        plain.step(vectors(1))
        expected = plain.state_dict()
    trainer = stages(stage_factory=Hungry, memory_limit="3MB")
    trainer.step(vectors(0))
    trainer.step(vectors(1))
    with pytest.raises(PipelineError, match="nothing was found that keeps 3,000,000 byt") as heard:
        trainer.step(vectors(2))
    assert equal(trainer.state_dict(), expected)
    ended = "this trainer has ended and cannot go on; build a new one"
    with pytest.raises(PipelineError, match=ended):
        trainer.step(vectors(2))
    with pytest.raises(PipelineError, match=ended):
        save_checkpoint(trainer, folder, names=lambda stage, name: f"{stage}.{name}")
    trainer.close()
    with stages(stage_factory=Hungry, memory_limit=least(heard.value)) as again:
        for step in range(SETTLED):
            again.step(vectors(step))


def test_a_limit_that_is_refused_after_measuring(on_ranks: Ranks, tmp_path: Path) -> None:
    on_ranks(refused_after_measuring, 2, (tmp_path,), timeout=60.0)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("store", [5, "", b"/tmp"])
def test_a_store_that_is_no_folder(store: object) -> None:
    with pytest.raises(PipelineError, match="store is the folder for what is offl"):
        stages(store=store, memory_limit="1GiB", ranks=1)
