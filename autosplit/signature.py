"""What decides whether a captured graph fits a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CaptureError


@dataclasses.dataclass(frozen=True)
class Signature:
    """Everything that a graph was specialised for. Two calls with equal signatures run one
    graph: input structure and tensors' shape, strides, dtype, device and ``requires_grad``;
    other inputs by value; the parameters' dtype, device and ``requires_grad``; every
    submodule's train/eval mode; grad mode; autocast.
    """

    structure: Hashable
    leaves: tuple[Hashable, ...]
    parameters: tuple[Hashable, ...]
    training: tuple[bool, ...]
    modes: tuple[Hashable, ...]

    @classmethod
    def of(cls, model: nn.Module, leaves: list[Any], structure: Any) -> Signature:
        """Raises CaptureError where an input is neither a tensor nor hashable."""
        return cls(
            structure,
            tuple(map(_leaf, leaves)),
            tuple((p.requires_grad, p.dtype, p.device, p.shape) for p in model.parameters()),
            tuple(module.training for module in model.modules()),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *_autocast()),
        )


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return (leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad)
    try:
        hash(leaf)
    except TypeError as error:
        raise CaptureError(
            f"an input is a {type(leaf).__name__}, which is neither a tensor nor hashable; pass "
            "tensors, numbers, strings, or lists, tuples and dicts of them"
        ) from error
    # 1, 1.0 and True are equal but trace to different graphs.
    return (type(leaf), leaf)


def _autocast() -> tuple[Hashable, ...]:
    devices = ("cpu", "cuda")
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in devices
    )
