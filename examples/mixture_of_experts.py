"""Train a mixture of experts over two stages, each on two ranks that have experts of their own.

``python -m examples.mixture_of_experts`` starts the four processes itself;
``torchrun --nproc-per-node 4 -m examples.mixture_of_experts`` does the same over torchrun.
"""

from __future__ import annotations

import os
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autosplit import PipelineTrainer, launch, process_group
from examples.decoder import Decoder, LlamaConfig, next_byte_loss
from examples.stages import seeded
from examples.text import batch

STAGES = EXPERT_RANKS = 2
MICROBATCHES = 4
CONFIG = LlamaConfig(dim=64, layers=4, heads=4, kv_heads=4, hidden=128, seq=64)


class Mixture(nn.Module):
    """A feed-forward layer of as many experts as there are ranks along "ep", one on each.

    Every token goes to the expert that the router likes best: to the rank that has it, and back.

    Args:
        config: sizes of the model.
        ep: the ranks.
    """

    def __init__(self, config: LlamaConfig, ep: DeviceMesh) -> None:
        super().__init__()
        self.ep = ep
        self.router = nn.Linear(config.dim, ep.size(), bias=False)
        self.up = self._spread(torch.randn(ep.size(), config.dim, config.hidden) / 10)
        self.down = self._spread(torch.randn(ep.size(), config.hidden, config.dim) / 10)

    def _spread(self, weights: Tensor) -> nn.Parameter:
        """Weights of all experts, of which this rank keeps its own."""
        return nn.Parameter(distribute_tensor(weights, self.ep, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gate, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = (expert[:, None] == torch.arange(self.ep.size(), device=x.device)).sum(0)
        # How many come from each rank, and then they.
        group = self.ep.get_group()
        given, taken = counts.tolist(), all_to_all_single(counts, None, None, group).tolist()
        came = all_to_all_single_autograd(tokens[order], taken, given, group)
        made = self._expert(came)
        back = all_to_all_single_autograd(made, given, taken, group)
        mixed = torch.zeros_like(tokens).index_add(0, order, back * gate[order, None])
        return mixed.view_as(x)

    def _expert(self, tokens: Tensor) -> Tensor:
        up, down = (cast("DTensor", each).to_local()[0] for each in (self.up, self.down))
        return nn.functional.silu(tokens @ up) @ down


def stage(index: int, ep: DeviceMesh, config: LlamaConfig = CONFIG) -> nn.Module:
    """The same on all ranks along "ep", but for the experts."""
    module = Decoder(config, index, STAGES)
    for number, layer in module.layers.items():
        with seeded(1, int(number)):
            layer.feed_forward = Mixture(config, ep)
    return module


def train(steps: int, config: LlamaConfig = CONFIG) -> list[float]:
    """One rank's work; every rank runs the same lines."""
    mesh = init_device_mesh("cpu", (STAGES, EXPERT_RANKS), mesh_dim_names=("pp", "ep"))
    losses = []
    with PipelineTrainer(
        lambda index: stage(index, mesh["ep"], config),
        next_byte_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        stages=STAGES,
        microbatches=MICROBATCHES,
        mesh=mesh,
        max_grad_norm=1.0,
    ) as trainer:
        share = mesh.get_local_rank("ep")  # a batch of its own for each of the ranks along "ep"
        for step in range(steps):
            given = batch(EXPERT_RANKS * step + share, 2 * MICROBATCHES, config.seq)
            losses.append(trainer.step(given).mean().item())
            if trainer.rank == share == 0:
                print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


def main(steps: int = 10, config: LlamaConfig = CONFIG) -> list[float]:
    if "RANK" in os.environ:  # torchrun started this process as one of its ranks
        torch.set_num_threads(1)
        with process_group():
            return train(steps, config)
    return launch(train, STAGES * EXPERT_RANKS, (steps, config), timeout=300.0)[0]


if __name__ == "__main__":
    main()
