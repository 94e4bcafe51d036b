"""Trainers within limits as users reach them, for spawned processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autosplit
from autosplit.checkpoint import save_checkpoint
from autosplit.errors import PipelineError
from autosplit.pipeline import RunOptions
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.stage import Stage
from tests.pipeline.trainer_options import grouped
from tests.pipeline.workers import equal

VOCABULARY, LENGTH, MICROBATCHES = 64, 16, 2
SETTLED = 6  # steps


class Logits(nn.Module):
    """A language model as people wrap it for a pipeline: token ids in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Logits(GPT2LMHeadModel(config))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [each for _ in range(2) for each in (nn.Linear(48, 48), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers)


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (4 * MICROBATCHES, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def vectors(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    one, other = torch.randn(2, 64 * MICROBATCHES, 48, generator=generator)
    return one.clone(), other.clone()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


MODELS: dict[str, Any] = {
    "gpt2": (gpt2, tokens, cross_entropy),
    "mlp": (mlp, vectors, nn.functional.mse_loss),
}


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def advised(name: str) -> dict[str, Any]:
    """The limits that refusals advised, one after another, and what a rank held within the last."""
    build, batch_of, loss_fn = MODELS[name]
    inputs, _ = batch_of(0)
    plan = autosplit.partition(
        build(),
        (inputs[: len(inputs) // MICROBATCHES],),
        stages=2,
        microbatches=MICROBATCHES,
        costs="estimate",
    )
    advice: list[int] = [1024]
    for _ in range(3):
        try:
            torch.manual_seed(dist.get_rank())
            with plan.trainer(
                loss_fn,
                adam,
                memory_limit=advice[-1],
                run_options=RunOptions(timeout=60.0),
            ) as trainer:
                for step in range(SETTLED):
                    trainer.record = "memory" if step == SETTLED - 1 else False
                    trainer.step(batch_of(step))
                memory = trainer.memory()
            held = [*map(sum, zip(memory.peak_activations, memory.fixed, strict=True))]
            return {"advice": advice[1:], "held": held}
        except PipelineError as error:
            said = re.search(r"memory_limit=(\d+)", str(error))
            if said is None:
                raise
            advice.append(int(said[1]))
    return {"advice": advice[1:], "held": None}


# --- what is refused ------------------------------------------------------------------------------


class Hungry(Stage):
    """A stage whose forward takes memory that no graph tells of."""

    def forward(self, *args: Any, **options: Any) -> list[Tensor]:
        torch.empty(4_000_000, dtype=torch.uint8)
        return super().forward(*args, **options)


def stages(**options: Any) -> PipelineTrainer:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return PipelineTrainer(
        [nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(2)],
        nn.functional.mse_loss,
        adam,
        microbatches=MICROBATCHES,
        **grouped(timeout=60.0, **options),
    )


def refused_after_measuring(folder: Path) -> dict[str, Any]:
    """Steps within a limit that only holds as graphs have it, and what is left of the trainer."""
    with stages(stage_factory=Hungry) as plain:
        plain.step(vectors(0))
        plain.step(vectors(1))
        expected = plain.state_dict()
    trainer = stages(stage_factory=Hungry, memory_limit="3MB")
    done = 0
    try:
        while done < SETTLED:
            trainer.step(vectors(done))
            done += 1
        heard = ""
    except PipelineError as error:
        heard = str(error)
    found = {"done": done, "heard": heard, "same": equal(trainer.state_dict(), expected)}
    for name, call in {
        "step": lambda: trainer.step(vectors(done)),
        "checkpoint": lambda: save_checkpoint(trainer, folder, names=lambda s, n: f"{s}.{n}"),
    }.items():
        try:
            call()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    trainer.close()
    limit = int(re.findall(r"memory_limit=(\d+)", heard)[0])
    with stages(stage_factory=Hungry, memory_limit=limit) as again:
        found["again"] = [float(again.step(vectors(step)).sum()) for step in range(SETTLED)]
    return found


def refused_batches() -> list[str]:
    """What is said of batches that no step could take, before the first step and after it; each
    rank gives what it has, the wrong part of which is on one of them.
    """
    rank = dist.get_rank()
    said = []
    with stages(memory_limit="1GiB") as trainer:
        inputs, targets = vectors(0)
        whole = (inputs, None) if rank == 0 else (None, targets)
        odd = (inputs[:-1], None) if rank == 0 else whole
        small = (inputs[:MICROBATCHES], None) if rank == 0 else whole
        both = inputs[:8], targets[:8]
        for place, batch in enumerate((odd, small, whole, small, both, whole)):
            try:
                trainer.predict_memory(batch)
                said.append("")
            except PipelineError as error:
                said.append(str(error))
            if place in (2, 5):
                trainer.step(batch)
    return said
