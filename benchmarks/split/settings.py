"""What is measured, and how often."""

from __future__ import annotations

import dataclasses

import torch

from .models import SIZES, Subject, build


@dataclasses.dataclass(frozen=True)
class Settings:
    """Attributes:
    size: key of ``models.SIZES``.
    device: "cpu" or "cuda".
    models: names of models.
    threads: numbers of threads; every time is measured with each.
    rounds: timed microbatches of each contender.
    """

    size: str
    device: str
    models: tuple[str, ...]
    threads: tuple[int, ...]
    rounds: int

    def subject(self, model: str) -> Subject:
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        return build(model, SIZES[self.size][model], self.device, dtype)
