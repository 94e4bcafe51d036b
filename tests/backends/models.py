"""Models for commands."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def linear() -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Sequential(nn.Linear(12, 6), nn.GELU()), (torch.randn(3, 12),)
