"""What a trainer tells of its last step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer

WIDTH, LAYERS, M, SAMPLES, LENGTH = 16, 3, 4, 8, 6


def build(index: int) -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*([] if index else [nn.Embedding(11, WIDTH)]), *layers)


def test_metrics_of_a_step() -> None:
    batch = torch.ones(SAMPLES, LENGTH, dtype=torch.int64), torch.zeros(SAMPLES, LENGTH, WIDTH)
    with PipelineTrainer(
        build,
        nn.functional.mse_loss,
        torch.optim.SGD,
        stages=2,
        microbatches=M,
        ranks=1,
        max_grad_norm=1.0,
    ) as trainer:
        with pytest.raises(PipelineError, match="no metrics of the last step"):
            trainer.metrics()
        loss = trainer.step(batch).mean().item()
        found = trainer.metrics(peak_flops=1e12)
        assert found["loss"] == loss
        assert found["grad_norm"] == trainer.grad_norm
        assert found["samples_per_s"] * found["seconds"] == pytest.approx(SAMPLES)
        assert found["tokens_per_s"] * found["seconds"] == pytest.approx(SAMPLES * LENGTH)
        product = 2 * SAMPLES * LENGTH * WIDTH * WIDTH  # forward, and as much for dX and for dW
        assert found["flops_per_s"] * found["seconds"] == pytest.approx(2 * LAYERS * 3 * product)
        assert found["mfu"] * 1e12 == pytest.approx(found["flops_per_s"])
        assert "bubble" not in found
        trainer.record = "memory"
        trainer.step(batch)
        found, memory = trainer.metrics(), trainer.memory()
        whole = trainer.timeline().makespan
        assert found["bubble"] >= 1.0 - whole / found["seconds"]
        assert found["bubble"] < 1.0
        assert memory.peak_activations[0] < found["peak_memory"]
        assert found["peak_memory"] <= memory.fixed[0] + memory.peak_activations[0]
        assert "stages [0, 1] of 2" in trainer.report()
        assert "tokens_per_s" in trainer.report()
        trainer.step_async(batch).wait()
        with pytest.raises(PipelineError, match="no metrics of the last step"):
            trainer.metrics()
