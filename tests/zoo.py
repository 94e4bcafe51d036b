"""Small models, each with what makes it hard to split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Made(nn.Module):
    """Whatever ``make`` makes of the module, whose attributes are ``parts``, and of its inputs."""

    def __init__(self, make: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.make = make
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(self, *args, **kwargs)


def layered(make: Callable[..., Any], **parts: Any) -> Made:
    """With two linear layers as well."""
    return Made(make, linear=nn.Linear(4, 4), second=nn.Linear(4, 4), **parts)


class Attention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        shape = (batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = self.qkv(self.norm(x)).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))


class SwiGLU(nn.Module):
    def __init__(self, dim: int = 16, hidden: int = 40) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Residual(nn.Module):
    """A norm, two products and an activation between them."""

    def __init__(self, dim: int = 8, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 2 * dim
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def mlp(dim: int = 8) -> nn.Module:
    """A residual block without a norm."""
    return Made(
        lambda m, x: x + m.down(torch.tanh(m.up(x))),
        up=nn.Linear(dim, 2 * dim),
        down=nn.Linear(2 * dim, dim),
    )


class TiedEmbedding(nn.Module):
    def __init__(self, vocabulary: int = 11, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.body = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.gelu(self.body(self.embed(tokens))))


class RepeatedLayer(nn.Module):
    """One parameter used twice with another layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.between = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.between(self.shared(x))))


class Counter(nn.Module):
    """A buffer that every forward updates and every backward reads as it was then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(2.0)
        return self.linear(x) * self.scale


class Several(nn.Module):
    """Several outputs: shared work, a view, an alias of the input, an integer, None."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.a(x)
        return {"y": y, "b": self.b(x), "top": y[:2], "x": x, "best": y.argmax(-1), "none": None}


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        h.mul_(2.0)
        h[:, 0] = 0.0
        return self.linear(h).sigmoid_()


class PlainParameters(nn.Module):
    """Parameters whose gradient is the output's own gradient, shared by two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3))
        self.b = nn.Parameter(torch.randn(3))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b


class Frozen(nn.Module):
    """LoRA-style: a little that trains deep in a frozen net."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)
        self.last = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h + self.up(self.down(h)))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, groups=2, bias=False),
        nn.GroupNorm(2, 6),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(6, 4, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def llama(**settings: Any) -> nn.Module:
    """Of transformers, one layer unless told otherwise."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**sizes, **heads, **settings})
    )
    return model


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, an input for it, and a loss on its output."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    loss: Callable[[Any], Tensor] = lambda output: output.square().mean()


def _several_loss(output: dict[str, Any]) -> Tensor:
    return output["y"].pow(3).sum() + output["top"].square().sum() + output["x"].sum()


CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(4, 3), lambda: torch.randn(5, 4)),
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
        lambda: torch.randn(2, 3, 4),
    ),
    "attention": Case(lambda: Attention(), lambda: torch.randn(2, 8, 16)),
    "transformer": Case(
        lambda: nn.Sequential(Attention(), SwiGLU()),
        lambda: torch.randn(2, 8, 16),
    ),
    "encoder_layer": Case(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: torch.randn(2, 5, 8),
    ),
    "convolutions": Case(convolutions, lambda: torch.randn(4, 3, 8, 8)),
    "tied": Case(TiedEmbedding, lambda: torch.randint(0, 11, (3, 5))),
    "repeated": Case(RepeatedLayer, lambda: torch.randn(5, 6)),
    "counter": Case(Counter, lambda: torch.randn(5, 4)),
    "several": Case(Several, lambda: torch.randn(3, 4), _several_loss),
    "in_place": Case(InPlace, lambda: torch.randn(3, 4)),
    "plain_parameters": Case(PlainParameters, lambda: torch.randn(3), lambda out: out.sum()),
    "frozen": Case(Frozen, lambda: torch.randn(5, 6)),
    "float64": Case(lambda: RepeatedLayer().double(), lambda: torch.randn(5, 6).double()),
    "bfloat16": Case(lambda: SwiGLU().bfloat16(), lambda: torch.randn(2, 4, 16).bfloat16()),
}
