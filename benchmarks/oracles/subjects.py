"""A dozen small models that differ in what splitting has to do, each with a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..coverage.architectures import FAMILIES

Call = tuple[tuple[Any, ...], dict[str, Any]]

_ARCHITECTURES = ("llama", "gpt2", "bert", "t5", "mamba", "mixtral", "vit", "resnet", "whisper")


class Tied(nn.Module):
    """One parameter read twice, as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(self.embedding(tokens)))
        scores: Tensor = hidden @ self.embedding.weight.t()
        return scores


class Views(nn.Module):
    """Outputs that are views, one of them of another's storage, and an input that is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> dict[str, Any]:
        first, second = self.project(x).chunk(2, dim=-1)
        second = second.transpose(0, 1)
        return {"first": first, "pair": (second.relu(), second)}


class Several(nn.Module):
    """Two inputs, a branch without parameters, and a frozen layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.frozen, self.two = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = self.two(self.frozen(self.one(x)).sigmoid() * y) * self.scale
        return outputs + x[..., :3]


def _grad(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


_BUILT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Call]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)),
        lambda: ((_grad(3, 8),), {}),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 2, 2, stride=2),
            nn.GroupNorm(2, 2),
        ),
        lambda: ((_grad(2, 3, 8, 8),), {}),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 2)),
        lambda: ((_grad(4, 8),), {}),
    ),
    "lstm": (lambda: nn.LSTM(6, 5, 2, batch_first=True), lambda: ((_grad(2, 7, 6),), {})),
    "gru cell": (lambda: nn.GRUCell(6, 5), lambda: ((_grad(2, 6), _grad(2, 5)), {})),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: ((_grad(2, 5, 8),), {}),
    ),
    "bfloat16": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8)).bfloat16(),
        lambda: ((torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True),), {}),
    ),
    "tied": (Tied, lambda: ((torch.randint(0, 11, (2, 5)),), {})),
    "views": (Views, lambda: ((_grad(3, 8),), {})),
    "several": (Several, lambda: ((_grad(2, 6), _grad(2, 6)), {})),
}


def subjects() -> Iterator[tuple[str, nn.Module, Call]]:
    """Name, module in training, and arguments; the same every time."""
    for name, (build, call) in _BUILT.items():
        torch.manual_seed(0)
        yield name, build(), call()
    known = {each.model_type: each for family in FAMILIES.values() for each in reversed(family)}
    for name in _ARCHITECTURES:
        torch.manual_seed(0)
        subject = known[name].subject(True if known[name].can_tie else None, True)
        yield name, subject.build(), subject.call()
