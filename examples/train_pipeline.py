"""Train two stages in two processes.

``python -m examples.train_pipeline`` starts both itself;
``torchrun --nproc-per-node 2 -m examples.train_pipeline`` does the same over torchrun.
"""

from __future__ import annotations

import os

import torch

from autosplit import PipelineTrainer, launch, process_group
from examples.decoder import Decoder, LlamaConfig, next_byte_loss
from examples.text import batch

STAGES = 2
MICROBATCHES = 4
CONFIG = LlamaConfig(dim=64, layers=4, heads=4, kv_heads=4, hidden=128, seq=64)


def train(steps: int) -> list[float]:
    """One rank's work; every rank runs the same lines."""
    losses = []
    with PipelineTrainer(
        lambda index: Decoder(CONFIG, index, STAGES),
        next_byte_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        stages=STAGES,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        max_grad_norm=1.0,
    ) as trainer:
        for step in range(steps):
            losses.append(trainer.step(batch(step, 2 * MICROBATCHES, CONFIG.seq)).mean().item())
            if trainer.rank == 0:
                print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


def main(steps: int = 10) -> list[float]:
    if "RANK" in os.environ:  # torchrun started this process as one of its ranks
        torch.set_num_threads(1)
        with process_group():
            return train(steps)
    return launch(train, STAGES, (steps,), timeout=120.0)[0]


if __name__ == "__main__":
    main()
