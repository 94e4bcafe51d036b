"""Layers a generated module is put together from; each maps [batch, time, width] to the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

BATCH, TIME, WIDTH = 2, 4, 8


class _Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class Channels(_Around):
    """A layer over [batch, channels, ...], given the width as its channels."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return y


class Picture(_Around):
    """A two-dimensional layer over time and width."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.unsqueeze(1)).squeeze(1)
        return y


class First(_Around):
    """A layer that returns several things, of which the first is used."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


class Gate(nn.Module):
    """Two vectors as bare parameters; the gradient of the second is its output's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.shift = nn.Parameter(torch.randn(TIME, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Constant(nn.Module):
    """A parameter that is returned as it is, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(TIME, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand_as(x)


class Tokens(nn.Module):
    """An embedding of tokens that the module makes from its input's signs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.table((x > 0).sum(-1) % WIDTH)
        return x + y


class Counter(nn.Module):
    """A buffer that every forward writes into and that the backward reads as it was."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        self.scale.mul_(1.5)
        return y + self.scale


class RunningMean(nn.Module):
    """A buffer that follows the activations."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)).to(self.mean.dtype), 0.25)
        return (x - self.mean) * self.mean.add(1).cos()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return y


class Mixed(nn.Module):
    """A layer under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = self.layer(x)
        return y.to(x.dtype)


def _low_rank() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 3, bias=False), nn.ReLU(inplace=True), nn.Linear(3, WIDTH)
    )


LAYERS: Mapping[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear_without_bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "low_rank": _low_rank,
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "batch_norm": lambda: Channels(nn.BatchNorm1d(WIDTH)),
    "group_norm": lambda: Channels(nn.GroupNorm(2, WIDTH)),
    "instance_norm": lambda: Channels(nn.InstanceNorm1d(WIDTH, affine=True)),
    "conv": lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "grouped_conv": lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4, bias=False)),
    "transposed_conv": lambda: Channels(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)),
    "conv2d": lambda: Picture(nn.Conv2d(1, 1, 3, padding=1)),
    "attention": SelfAttention,
    "recurrent": lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "prelu": nn.PReLU,
    "gate": Gate,
    "constant": Constant,
    "tokens": Tokens,
    "counter": Counter,
    "running_mean": RunningMean,
    "checkpointed": Checkpointed,
    "mixed_precision": Mixed,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "dropout": lambda: nn.Dropout(0.5),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True),
}
