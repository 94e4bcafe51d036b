"""A language model of transformers, trained on a file of text over several ranks.

``python -m examples.language_model FOLDER --data book.txt`` starts two ranks of this machine. Under
torchrun it is one of the ranks, of any machines that see the same files:

    torchrun --nproc-per-node 2 --max-restarts 3 -m examples.language_model FOLDER \\
        --data book.txt --checkpoint run --every 100

FOLDER has the ``config.json`` of a causal model (BERT and its kind are one with ``"is_decoder":
true`` only, and see what they are to predict without); its safetensors, if it has any, are where
training begins. A run whose checkpoint is there goes on from it, over any number of ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from autosplit import launch, load_checkpoint, meta_model, partition, process_group, save_checkpoint
from autosplit.checkpoint import read_progress
from autosplit.errors import CheckpointError

MICROBATCHES_PER_RANK = 2


@dataclass(frozen=True)
class Settings:
    """One run; every rank has the same. Documented where the command has them."""

    model: Path
    data: Path
    ranks: int = 2
    steps: int = 100
    batch: int = 4
    length: int = 128
    schedule: str = "1f1b"
    learning_rate: float = 1e-3
    memory_limit: str | None = None
    seed: int = 0
    estimate: bool = False
    checkpoint: Path | None = None
    every: int | None = None
    history: Path | None = None


@dataclass(frozen=True)
class Windows:
    """The windows of a text, a batch a step; each pass through them is in an order of its own.

    Attributes:
        tokens: int64 [tokens].
        length: tokens in a window, and as many targets, which are one token later.
        batch: windows in a step.
    """

    tokens: Tensor
    length: int
    batch: int

    @property
    def count(self) -> int:
        """Windows in one pass."""
        return (len(self.tokens) - 1) // self.length

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, int64 [batch, length]; the same whenever they are asked
        for, so that a run that is resumed goes on in the text where it was.
        """
        first = step * self.batch
        passes = range(first // self.count, (first + self.batch - 1) // self.count + 1)
        order = torch.cat([self._order(each) for each in passes])
        begin = first - passes.start * self.count
        starts = order[begin : begin + self.batch] * self.length
        windows = self.tokens[starts[:, None] + torch.arange(self.length + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _order(self, number: int) -> Tensor:
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(number))

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change where a run goes on, or its steps would be of other windows."""
        digest = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()
        return {"batch": self.batch, "length": self.length, "text": digest}


def read_tokens(model: Path, data: Path) -> Tensor:
    """The token ids of a text, int64 [tokens]: its bytes where there is no tokenizer."""
    text = data.read_text(encoding="utf-8")
    if not any(model.glob("tokenizer*")):
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def next_token_loss(output: Any, targets: Tensor) -> Tensor:
    """Cross-entropy in float32: what ``model(ids, labels=ids)`` of transformers takes."""
    return F.cross_entropy(output.logits.flatten(0, -2).float(), targets.flatten())


def train(settings: Settings) -> list[float]:
    """One rank's work; every rank runs the same lines. The losses of its steps."""
    config = AutoConfig.from_pretrained(settings.model, local_files_only=True)
    config.use_cache = config.get_text_config().use_cache = False  # else all keys are outputs
    # Trained in float32, whatever the config says of the dtype that it is saved in.
    build = functools.partial(AutoModelForCausalLM.from_config, config, dtype=torch.float32)
    tokens = read_tokens(settings.model, settings.data)
    windows = Windows(tokens, settings.length, settings.batch)
    microbatches = min(settings.batch, MICROBATCHES_PER_RANK * settings.ranks)
    inputs = windows.of_step(0)[0][: settings.batch // microbatches]
    asked = {
        "stages": settings.ranks,
        "microbatches": microbatches,
        "schedule": settings.schedule,
        "costs": "estimate" if settings.estimate else "profile",
        "memory_limit": settings.memory_limit,
    }
    # No rank has memory for more than its stages.
    plan = partition(meta_model(build), inputs, **(saved_plan(settings, asked) or asked))
    plan.initialise()
    progress = windows.identity | {"asked": asked, "plan": plan.arguments}
    losses = []
    with plan.trainer(
        next_token_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=settings.learning_rate),
        max_grad_norm=1.0,
    ) as trainer:
        torch.manual_seed(settings.seed)  # of dropout, which differs from stage to stage
        first = resume(trainer, settings, windows)
        for step in range(first, settings.steps):
            start = time.perf_counter()
            losses.append(trainer.step(windows.of_step(step)).mean().item())
            seconds, done = time.perf_counter() - start, step + 1
            if trainer.rank == 0:
                tell(settings, done, losses[-1], trainer.grad_norm, seconds)
            due = done == settings.steps or (settings.every and done % settings.every == 0)
            if settings.checkpoint is not None and due:
                save_checkpoint(trainer, settings.checkpoint, step=done, extra=progress)
    return losses


def saved_plan(settings: Settings, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The plan of the run's checkpoint, if it was asked for in the same way: cut elsewhere, the
    model would draw other dropout.
    """
    there = settings.checkpoint
    if there is None or not (there / ".metadata").exists():
        return None
    _, extra = read_progress(there)
    plan: dict[str, Any] | None = extra.get("plan")
    return plan if extra.get("asked") == asked else None


def resume(trainer: Any, settings: Settings, windows: Windows) -> int:
    """Take up the run's checkpoint, or the model's own weights, if either is there: at which step
    to go on.
    """
    there = settings.checkpoint
    if there is not None and (there / ".metadata").exists():
        found = load_checkpoint(trainer, there)
        if found.step is None or not windows.identity.items() <= found.extra.items():
            raise CheckpointError(f"{there} is of a run with another text, batch or length")
        return found.step
    if any(settings.model.glob("*.safetensors")):
        load_checkpoint(trainer, settings.model)
    return 0


def tell(
    settings: Settings, step: int, loss: float, grad_norm: float | None, seconds: float
) -> None:
    """Print a step; the history has a line of JSON for each, again where one was made twice."""
    row = {"step": step, "loss": loss, "grad_norm": grad_norm, "seconds": seconds}
    row["tokens_per_s"] = settings.batch * settings.length / seconds
    print(f"step {step} of {settings.steps}: loss {loss:.4f}", flush=True)
    if settings.history is not None:
        with settings.history.open("a") as file:
            file.write(json.dumps(row) + "\n")


_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("model", type=_PATH)
@click.option("--data", required=True, type=_PATH, help="UTF-8 text.")
@click.option("--pp", "ranks", default=2, show_default=True, help="Stages, one a rank.")
@click.option("--steps", default=100, show_default=True, help="At which to end.")
@click.option("--batch", default=4, show_default=True, help="Windows of text in a step.")
@click.option("--length", default=128, show_default=True, help="Tokens in a window.")
@click.option("--schedule", default="1f1b", show_default=True, help="See autosplit simulate.")
@click.option("--lr", "learning_rate", default=1e-3, show_default=True, help="Of AdamW.")
@click.option("--memory-limit", help="Most that a rank may hold, such as 12GiB.")
@click.option("--seed", default=0, show_default=True, help="Of dropout.")
@click.option("--estimate", is_flag=True, help="Cut by FLOPs and bytes; measure nothing.")
@click.option("--checkpoint", type=_PATH, help="Folder; a run that is there goes on.")
@click.option("--every", type=int, help="Steps between checkpoints; default: one at the end.")
@click.option("--history", type=_PATH, help="File of JSON lines, one a step.")
def main(**options: Any) -> list[float]:
    """Train a causal MODEL of transformers on a file of text."""
    settings = Settings(**options)
    if "RANK" in os.environ:  # torchrun started this process as one of its ranks
        with process_group():
            return train(settings)
    day = 24 * 3600.0
    return launch(train, settings.ranks, (settings,), timeout=20 * day)[0]


if __name__ == "__main__":
    main()
