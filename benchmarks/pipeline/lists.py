"""Captures and memory over many steps of changing lengths and numbers of microbatches.

    python -m benchmarks.pipeline.lists --steps 200

Lengths are those of the paragraphs of the repository's own documentation, in bytes, in random
order. Prints the captures of each stage and the process's largest resident memory, ten times.
"""

from __future__ import annotations

import argparse
import random
import resource
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.pipeline import PipelineTrainer
from examples.reward_weighted import WIDTH, WORDS, Encoder

_LONGEST = 512


def paragraphs(folder: Path) -> list[bytes]:
    """The paragraphs of all pages, each cut to ``_LONGEST`` bytes."""
    texts = (page.read_bytes() for page in sorted(folder.glob("*.md")))
    return [part[:_LONGEST] for text in texts for part in text.split(b"\n\n") if len(part) > 2]


def microbatch(paragraph: bytes) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a paragraph."""
    ids = torch.tensor([*paragraph])[None] % WORDS
    return ids[:, :-1], ids[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the tokens of a paragraph."""
    return F.cross_entropy(logits[0], targets[0])


def main() -> None:
    """Run the steps, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    texts = paragraphs(Path(__file__).parents[2] / "docs")
    generator = random.Random(0)
    stages = [Encoder(), nn.Linear(WIDTH, WORDS)]
    with PipelineTrainer(stages, loss_fn, torch.optim.SGD, microbatches=16, ranks=1) as trainer:
        for step in range(1, steps + 1):
            rows = [microbatch(text) for text in generator.sample(texts, generator.randint(16, 64))]
            trainer.step(microbatches=rows, weight=[float(y.numel()) for _, y in rows])
            if step % max(steps // 10, 1) == 0:
                graphs: Any = trainer.stages
                captures = [len(graphs[index].captured) for index in sorted(graphs)]
                resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
                print(f"step {step}: captures {captures}, {resident} MiB at most")


if __name__ == "__main__":
    main()
