"""Train on answers that are weighted by rewards: another number of answers in each step.

    torchrun --nproc-per-node 2 examples/reward_weighted.py    a stage on each of two processes
    python examples/reward_weighted.py                         both stages in this process

A step gets the answers whose reward is above zero. Each answer is a microbatch of its own length,
with its reward times its number of tokens as its weight.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import PipelineTrainer, process_group

WORDS, WIDTH = 32, 32


class Encoder(nn.Module):
    """The first stage: embeds the tokens, and attends to earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        mixed: Tensor = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed


def answers(generator: torch.Generator) -> list[tuple[Tensor, float]]:
    """Draw answers, each of its own length, and their rewards: counting up is good."""
    drawn = []
    for _ in range(12):
        length = int(torch.randint(4, 24, (), generator=generator))
        start, step = torch.randint(WORDS, (2,), generator=generator)
        tokens = (start + torch.arange(length + 1) * (step % 4)) % WORDS
        drawn.append((tokens[None], float(step % 4 == 1) + 0.25 * float(step % 4 == 2)))
    return drawn


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the tokens of an answer."""
    return F.cross_entropy(logits[0], targets[0])


def train(steps: int = 20, ranks: int | None = None) -> list[float]:
    """Train over this number of processes, None for all, and return the loss of each step."""
    generator, losses = torch.Generator().manual_seed(0), []
    with PipelineTrainer(
        [Encoder(), nn.Linear(WIDTH, WORDS)],
        loss_fn,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        microbatches=4,
        ranks=ranks,
    ) as trainer:
        for _ in range(steps):
            rewarded = [(tokens, reward) for tokens, reward in answers(generator) if reward]
            if not rewarded:
                continue
            trainer.step(
                microbatches=[(tokens[:, :-1], tokens[:, 1:]) for tokens, _ in rewarded],
                weight=[reward * (tokens.numel() - 1) for tokens, reward in rewarded],
            )
            losses.append(trainer.metrics()["loss"])
    return losses


def main() -> None:
    """Train under torchrun, or in one process."""
    torch.manual_seed(0)
    if not dist.is_torchelastic_launched():
        print(*train(ranks=1), sep="\n")
        return
    with process_group():
        losses = train()
        if dist.get_rank() == 0:
            print(*losses, sep="\n")


if __name__ == "__main__":
    main()
