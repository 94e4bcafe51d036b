"""What tells calls apart before any guard is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class Signature:
    """The inputs of a call as a graph is specialised for them, and the modes it runs in.

    Input structure; tensors' shape, strides, dtype, device and ``requires_grad``; numbers and
    strings by value; other objects by type, because guards look into them. Then grad mode,
    inference mode and autocast. What the graph read of the module itself is for its guards.
    """

    structure: Hashable
    leaves: tuple[Hashable, ...]
    modes: tuple[Hashable, ...]

    @classmethod
    def of(cls, leaves: list[Any], structure: Any) -> Signature:
        return cls(
            structure,
            tuple([_leaf(leaf) for leaf in leaves]),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *_autocast()),
        )


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return (leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad)
    kind: Any = type(leaf)
    # 1, 1.0 and True are equal but trace to different graphs.
    return (kind, leaf) if isinstance(leaf, _VALUES) else kind


def _autocast() -> tuple[Hashable, ...]:
    devices = ("cpu", "cuda")
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in devices
    )
