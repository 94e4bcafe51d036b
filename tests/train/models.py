"""Models that ``MODULE:FUNCTION`` names."""

from __future__ import annotations

from torch import nn


def causal(width: int = 16) -> nn.Module:
    """Logits of bytes."""
    return nn.Sequential(
        nn.Embedding(256, width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 256)
    )
