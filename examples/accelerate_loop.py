"""A loop of accelerate with a split model, adapted by LoRA where that is asked for.

``python -m examples.accelerate_loop`` trains a few steps; ``accelerate launch -m
examples.accelerate_loop`` does the same on as many processes as accelerate is told.
"""

from __future__ import annotations

from typing import Literal

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader

import autosplit
from examples.transformers_trainer import Windows, build

Split = Literal["no", "first", "last"]
"""Whether the model is split, and if so before or after ``prepare`` and ``get_peft_model``."""


def adapted(split: Split, *, dora: bool = False) -> nn.Module:
    """A model of which few parameters train; ``split`` goes in front of peft, or behind it."""
    model: nn.Module = build()
    if split == "first":
        model = autosplit.split(model)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=dora)
    model = get_peft_model(model, config)
    return autosplit.split(model) if split == "last" else model


def train(
    model: nn.Module, *, split: Split = "no", steps: int = 4, precision: str | None = None
) -> list[float]:
    """Train ``model`` with two batches a step; gives the losses and norms.

    Args:
        model: put out a loss.
        split: whether to split it here, before or after ``prepare``.
        steps: of the optimizer.
        precision: as accelerate takes it: ``"no"``, ``"bf16"``, ``"fp16"``.
    """
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
    if split == "first":
        model = autosplit.split(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: DataLoader[dict[str, torch.Tensor]]
    loader = DataLoader(Windows(4 * steps, 16, seed=0), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if split == "last":
        model = autosplit.split(model)
    told = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            told.append(loss.item())
            if accelerator.sync_gradients:
                told.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return told


if __name__ == "__main__":
    print(train(build(), split="first"))
    print(train(adapted("first")))
