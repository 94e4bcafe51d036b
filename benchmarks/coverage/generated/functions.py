"""What a generated module does between its layers: shapes in, the same shapes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Tensor]


class StraightThrough(torch.autograd.Function):
    """Rounds forward, passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


def _straight_through(x: Tensor) -> Tensor:
    y: Tensor = StraightThrough.apply(x)  # type: ignore[no-untyped-call]
    return y


def _write(x: Tensor) -> Tensor:
    return x.mul_(0.5)


def _write_copy(x: Tensor) -> Tensor:
    y = x + 1.0
    y.mul_(2.0)
    y[:, 0] = 0.0
    return y


def _write_through_view(x: Tensor) -> Tensor:
    y = x.clone()
    top = y[:, :2]
    top.mul_(3.0)
    y.view(-1)[::3].add_(1.0)
    return y


def _write_mask(x: Tensor) -> Tensor:
    return x.clone().masked_fill_(x > 0.5, 0.25).sigmoid_()


def _write_other(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[:, 1:] = y[:, :-1]
    return z


def _scramble(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape)


def _shift(x: Tensor) -> Tensor:
    return F.pad(x[:, 1:], (0, 0, 0, 1))


def _swap_halves(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(2, -1)[::-1], -1)


def _restack(x: Tensor) -> Tensor:
    return torch.stack(x.unbind(1)[::-1], 1)


def _broadcast(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x)


def _gather(x: Tensor) -> Tensor:
    return x[:, torch.tensor([0, 0, 2, 1])]


def _residual(x: Tensor) -> Tensor:
    return x + x.mean(1, keepdim=True)


def _attend(x: Tensor, y: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, y, y)


def _attend_with_dropout(x: Tensor, y: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, y, x, dropout_p=0.5)


def _drop_path(x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full((x.shape[0], 1, 1), 0.5, dtype=x.dtype))


def _noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def _no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2.0
    return x + y


def _hooked(x: Tensor) -> Tensor:
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2.0)
    return y


UNARY: Mapping[str, Function] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "silu": F.silu,
    "softmax": lambda x: x.softmax(-1),
    "square": torch.square,
    "clamp": lambda x: x.clamp(-1.0, 1.0),
    "write": _write,
    "write_copy": _write_copy,
    "write_through_view": _write_through_view,
    "write_mask": _write_mask,
    "scramble": _scramble,
    "flatten": lambda x: x.reshape(-1, x.shape[-1]).mul(2.0).view(x.shape),
    "flip": lambda x: x.flip(1),
    "shift": _shift,
    "swap_halves": _swap_halves,
    "restack": _restack,
    "broadcast": _broadcast,
    "gather": _gather,
    "residual": _residual,
    "functional_dropout": lambda x: F.dropout(x, 0.5),
    "drop_path": _drop_path,
    "noise": _noise,
    "detach": torch.detach,
    "no_grad": _no_grad,
    "straight_through": _straight_through,
    "hooked": _hooked,
}
BINARY: Mapping[str, Function] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "matmul": lambda x, y: (x @ y.transpose(1, 2)).tanh() @ y,
    "attend": _attend,
    "attend_with_dropout": _attend_with_dropout,
    "write_other": _write_other,
    "concatenate": lambda x, y: torch.cat([x, y], -1)[..., ::2],
}
FUNCTIONS: Mapping[str, Function] = {**UNARY, **BINARY}
# Steps that draw random numbers, the layer of that name among them.
RANDOM = frozenset({"dropout", "functional_dropout", "drop_path", "noise", "attend_with_dropout"})
