"""Weights that are tensor subclasses, frozen or trained, and quantization that is trained for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten
_KEEPING = (aten.detach.default, aten.clone.default, aten.alias.default)
WIDTH = 16


class Weight(Tensor):
    """A weight that products read in a way of its own; what holds it is named by its class."""

    names: tuple[str, ...]
    product: Callable[..., Any]

    def __init__(self, *held: Tensor) -> None:
        vars(self).update(zip(self.names, held, strict=True))

    def __tensor_flatten__(self) -> Any:
        return [*self.names], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Weight:
        return cls(*map(inner.__getitem__, cls.names))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}()"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return cls.product(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Int8(Weight):
    """An int8 weight with a scale for each row, as torchao's for bases of adapters."""

    names = ("codes", "scales")
    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    def dequantized(self) -> Tensor:
        return self.codes.to(self.dtype) * self.scales

    @staticmethod
    def product(x: Tensor, weight: Any, _bias: Any = None) -> Any:
        return _Int8Product.apply(x, weight)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _KEEPING:
            made = cls(func(args[0].codes), func(args[0].scales))
            return return_and_correct_aliasing(func, args, kwargs, made)
        plain = pytree.tree_map_only(cls, cls.dequantized, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Any:
        ctx.save_for_backward(weight)
        return (x @ weight.codes.to(x.dtype).t()) * weight.scales.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return (grad * weight.scales.view(-1)) @ weight.codes.to(grad.dtype), None


class Nf4(Int8):
    """Two codes of four bits in a byte, a scale for each 16 of them, as QLoRA's."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Nf4:
        shape = len(scales) // 2, 32
        return Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype)

    @classmethod
    def of(cls, weight: Tensor) -> Nf4:
        groups = weight.reshape(-1, 16)
        scales = groups.abs().amax(1, keepdim=True)
        codes = ((groups / scales + 1) * 7.5).round().to(torch.uint8).view(-1, 2)
        return cls(codes[:, 0] << 4 | codes[:, 1], scales)

    def dequantized(self) -> Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], -1)
        return ((codes.view(-1, 16) / 7.5 - 1) * self.scales).view(self.shape)

    @staticmethod
    def product(x: Tensor, weight: Any, _bias: Any = None) -> Any:
        return _Nf4Product.apply(x, weight)  # type: ignore[no-untyped-call]


class _Nf4Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantized())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight.dequantized(), None


class Adapted(nn.Module):
    """A frozen layer with a trained adapter of low rank."""

    def __init__(self, kind: type[Int8], width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(kind.of(torch.randn(out, width) / 4), requires_grad=False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, out, bias=False)

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight) + self.up(self.down(x)) / 2


def adapted(kind: type[Int8]) -> nn.Module:
    layers = (Adapted(kind, 32, 64), nn.GELU(), Adapted(kind, 64, 32)) if kind is Int8 else None
    layers = layers or (Adapted(kind, 32, 32), nn.GELU(), Adapted(kind, 32, 32))
    return nn.Sequential(nn.Linear(WIDTH, 32), *layers, nn.Linear(32, WIDTH))


class Mixed(Weight):
    """A trained weight whose products are computed in int8, as torchao's mixed precision."""

    names = ("held",)
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Mixed:
        return Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), dtype=held.dtype)

    @staticmethod
    def product(x: Tensor, weight: Any, bias: Tensor) -> Any:
        return _MixedProduct.apply(x, weight) + bias  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = pytree.tree_map_only(cls, lambda each: each.held, (args, kwargs or {}))
        made = func(*plain[0], **plain[1])
        if func in _KEEPING:
            return return_and_correct_aliasing(func, args, kwargs, cls(made))
        return args[0] if func.overloadpacket._qualified_op_name.endswith("_") else made


class _MixedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        rows, columns = _rounded(x), _rounded(weight.held)
        return rows[0] @ columns[0].t() * rows[1] * columns[1].view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.held, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (x / scale).round().to(torch.int8).float(), scale


def mixed() -> nn.Module:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    for layer in (layers[0], layers[2]):
        layer.weight = nn.Parameter(Mixed(layer.weight.data))  # type: ignore[arg-type]
    return layers


class Scaled(nn.Module):
    """Rounds what comes in, by a scale that it finds anew and keeps for whoever exports it."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.detach().abs().amax() / 127
        rounded = (x / self.scale).round() * self.scale
        return x + (rounded - x).detach()


class Observed(Scaled):
    """Keeps the largest that it has seen as an attribute that is no buffer."""

    largest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().abs().amax()
        self.largest = now if self.largest is None else torch.maximum(self.largest, now)
        return x + ((x / self.largest).round() * self.largest - x).detach()


def prepared() -> nn.Module:
    """By torch's own functions, whose observers take the shape of what they see first."""
    from torch.ao import quantization

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).train()
    vars(layers)["qconfig"] = quantization.get_default_qat_qconfig("fbgemm")
    found: nn.Module = quantization.prepare_qat(layers)
    return found


def trained_for(quantizer: type[nn.Module]) -> nn.Module:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(quantizer(), first, nn.GELU(), quantizer(), second)
