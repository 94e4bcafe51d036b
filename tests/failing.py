"""Factories that fail, or return what none should."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def raises() -> None:
    raise RuntimeError("my own failure")


def nothing() -> None:
    """No model at all."""


def listed() -> Any:
    return nn.Linear(4, 4), (), [1, 2]


def sized(size: str = "4") -> Any:
    return nn.Linear(int(size), 4), torch.randn(2, int(size))


def fails() -> Any:
    return nn.Linear(4, 4), 5


def dropping() -> Any:
    parts = nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Linear(4, 4)
    return nn.Sequential(*parts), torch.ones(64, 4)


def with_target() -> Any:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 5))
    return model, torch.randint(9, (4, 3)), torch.randint(5, (4,))


class Untraced(nn.Linear):
    """Fails when it runs, and not when it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            raise ValueError("out of memory")
        return super().forward(x)


def untraced() -> Any:
    return nn.Sequential(nn.Linear(4, 4), Untraced(4, 4)), (torch.ones(2, 4),)
