"""Models that ``MODULE:FUNCTION`` names."""

from __future__ import annotations

from torch import nn


def dropping() -> nn.Module:
    """The same, which draws."""
    return nn.Sequential(causal(), nn.Dropout(0.5))


def causal(width: int = 16) -> nn.Module:
    """Logits of bytes."""
    return nn.Sequential(
        nn.Embedding(256, width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 256)
    )
