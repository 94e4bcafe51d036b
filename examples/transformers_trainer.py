"""transformers' Trainer with a split model; it needs accelerate.

``python -m examples.transformers_trainer FOLDER`` trains, evaluates, and leaves checkpoints in the
folder, which ``from_pretrained`` reads. The one line that is not as ever is ``autosplit.split``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import autosplit
from examples.text import batch


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of the text that every Python carries, as bytes."""

    def __init__(self, count: int, seq: int, seed: int) -> None:
        self._ids = batch(seed, count, seq)[0]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index].clone()}


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def main(folder: str, *, split: bool = True, steps: int = 4, **options: Any) -> Trainer:
    """Train in ``folder``; ``options`` are further ones of ``TrainingArguments``, or ``resume``."""
    resume = options.pop("resume", None)
    model = build()
    arguments: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
    }
    trainer = Trainer(
        model=autosplit.split(model) if split else model,
        args=TrainingArguments(folder, **(arguments | options)),
        train_dataset=Windows(32, 16, seed=0),
        eval_dataset=Windows(5, 16, seed=1),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    return trainer


if __name__ == "__main__":
    print(main(sys.argv[1]).state.log_history[-1])
