"""Lightning with a split model: ``python -m examples.lightning_module``.

The model inside of the LightningModule is split, not the LightningModule itself.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autosplit
from examples.transformers_trainer import Windows, build


class Language(LightningModule):
    """Trains a causal language model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("held_out", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(*, split: bool = True, **options: Any) -> Language:
    """Train; ``options`` are further ones of Lightning's Trainer."""
    model = build()
    module = Language(autosplit.split(model) if split else model)
    arguments: dict[str, Any] = {
        "max_steps": 4,
        "accelerator": "cpu",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "logger": False,
    }
    trainer = Trainer(**(arguments | options))
    data = Windows(16, 16, seed=0), Windows(4, 16, seed=1)
    torch.manual_seed(0)
    trainer.fit(module, *(DataLoader(each, batch_size=2) for each in data))
    return module


if __name__ == "__main__":
    main()
