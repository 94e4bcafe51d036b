"""Train on packed documents: microbatches of other lengths in each step, over two stages.

    torchrun --nproc-per-node 2 examples/packed_documents.py    a stage on each of two processes
    python examples/packed_documents.py                         both stages in this process

Documents are packed one after another until a microbatch has enough tokens. So each microbatch has
its own length, and a step has as many microbatches as its documents fill. FlexAttention's
``BlockMask`` keeps documents apart: each stage makes the mask from the documents' numbers, which
travel with the activations. One capture of a stage serves all lengths and all masks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from autosplit import PipelineTrainer, process_group

WORDS, WIDTH, HEADS, BLOCK = 64, 32, 2, 16
FULL = 96
"""The number of tokens that fills a microbatch."""


class Layer(nn.Module):
    """Attention within documents.

    Args:
        first: whether the layer embeds token ids; else it returns logits.
    """

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH) if first else None
        self.head = None if first else nn.Linear(WIDTH, WORDS)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            x: token ids, shape [1, tokens], or activations, shape [1, tokens, WIDTH].
            documents: the number of the document of each token, shape [tokens].
        """
        if self.embedding is not None:
            x = self.embedding(x)

        def within_document(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents[query] == documents[key])

        tokens = x.shape[1]
        mask = flex.create_block_mask(
            within_document, None, None, tokens, tokens, device=x.device, BLOCK_SIZE=BLOCK
        )
        heads = self.qkv(x).view(1, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = flex.flex_attention(query, key, value, block_mask=mask)
        x = x + attended.transpose(1, 2).flatten(2)
        return (x, documents) if self.head is None else self.head(x)


def packed_documents(generator: random.Random, count: int) -> Iterator[list[list[int]]]:
    """Pack documents, whose lengths have a long tail, until a row has ``FULL`` tokens or more."""
    row: list[list[int]] = []
    for _ in range(count):
        length = min(2 + int(generator.lognormvariate(2.5, 0.8)), 2 * FULL)
        start = generator.randrange(WORDS)
        row.append([(start + step) % WORDS for step in range(length)])
        if sum(map(len, row)) >= FULL:
            yield row
            row = []


def microbatch(row: list[list[int]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The inputs (token ids, document numbers) of a packed row, and its targets."""
    ids = torch.tensor([token for document in row for token in document])
    numbers = torch.arange(len(row)).repeat_interleave(torch.tensor([*map(len, row)]))
    targets = ids.roll(-1)
    targets[numbers != numbers.roll(-1)] = -100  # the last token of a document has no target
    return (ids[None], numbers), targets


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the tokens that have a target."""
    return F.cross_entropy(logits[0], targets)


def train(steps: int = 8, ranks: int | None = None) -> list[float]:
    """Train over this number of processes, None for all, and return the loss of each step."""
    if not torch.cuda.is_available():
        # torch refuses FlexAttention's backward on the CPU when it runs eagerly; graphs have it.
        vars(flex)["_validate_device"] = lambda *_: None
    generator, losses = random.Random(0), []
    stages = [Layer(first=True), Layer(first=False)]
    with PipelineTrainer(
        stages,
        loss_fn,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        microbatches=4,
        ranks=ranks,
    ) as trainer:
        for _ in range(steps):
            rows = [*map(microbatch, packed_documents(generator, generator.randint(20, 40)))]
            trained = [float((targets >= 0).sum()) for _, targets in rows]
            trainer.step(microbatches=rows, weight=trained)
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
