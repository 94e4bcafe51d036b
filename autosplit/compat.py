"""torch internals that several parts need, under stable names.

With ``capture.py`` this is the only file that touches torch's private API; supporting a new
torch release means looking here and there, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

__all__ = [
    "StateReader",
    "TreeSpec",
    "flatten_named",
    "share_state",
    "tree_flatten",
    "tree_unflatten",
    "versions",
]


def flatten_named(root: str, tree: Any) -> list[tuple[str, Any]]:
    """Leaves of a pytree with the Python path that reaches each: ``output['logits'][0]``."""
    leaves, _ = tree_flatten_with_path(tree)
    return [(root + "".join(map(_key, path)), leaf) for path, leaf in leaves]


def _key(key: Any) -> str:
    if isinstance(key, MappingKey):
        return f"[{key.key!r}]"
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, GetAttrKey):
        return f".{key.name}"
    return f"[{key}]"


def versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """How often each tensor's storage was written in place, as autograd counts it."""
    return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])


class StateReader:
    """Reads a module's parameters and buffers by name, as they are at the moment of the call.

    Looks each one up where the module keeps it, so that a parameter that was moved or
    replaced since is found, without walking the module tree on every call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}
        for prefix, child in module.named_modules():
            for slots in (child._parameters, child._buffers):
                for name in slots:
                    self._slots[f"{prefix}.{name}" if prefix else name] = (slots, name)

    def __call__(self) -> dict[str, torch.Tensor]:
        found = {name: slots[key] for name, (slots, key) in self._slots.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def share_state(face: nn.Module, module: nn.Module) -> None:
    """Make ``face`` hold the very parameters, buffers and submodules of ``module``.

    The dictionaries are shared, not copied: both have one ``state_dict`` without a prefix,
    and replacing a parameter on either replaces it on both.
    """
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        face.__dict__[name] = module.__dict__[name]
    face.training = module.training
