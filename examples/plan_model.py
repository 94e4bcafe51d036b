"""A whole model trains in two processes, cut by measured cost, nothing rewritten.

``python -m examples.plan_model`` starts both processes itself;
``torchrun --nproc-per-node 2 -m examples.plan_model`` does the same over torchrun.
"""

from __future__ import annotations

import os

import torch

from autosplit import launch, partition, process_group
from examples.decoder import Decoder, LlamaConfig, next_byte_loss
from examples.text import batch

STAGES = 2
MICROBATCHES = 4
SIZE = 2  # samples in a microbatch
CONFIG = LlamaConfig(dim=64, layers=4, heads=4, kv_heads=4, hidden=128, seq=64)


def train(steps: int, seconds: float, config: LlamaConfig) -> list[float]:
    """One rank's work; every rank runs the same lines."""
    inputs, _ = batch(0, SIZE, config.seq)
    plan = partition(
        Decoder(config), inputs, stages=STAGES, microbatches=MICROBATCHES, seconds=seconds
    )
    losses = []
    with plan.trainer(
        next_byte_loss, lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)
    ) as trainer:
        if trainer.rank == 0:
            print(f"cut at {', '.join(plan.cuts)}; {1e3 * plan.predicted_step:.1f} ms foretold")
        for step in range(steps):
            losses.append(trainer.step(batch(step, plan.batch, config.seq)).mean().item())
            if trainer.rank == 0:
                print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


def main(steps: int = 10, seconds: float = 3.0, config: LlamaConfig = CONFIG) -> list[float]:
    if "RANK" in os.environ:  # torchrun started this process as one of its ranks
        torch.set_num_threads(1)
        with process_group():
            return train(steps, seconds, config)
    return launch(train, STAGES, (steps, seconds, config), timeout=120.0)[0]


if __name__ == "__main__":
    main()
