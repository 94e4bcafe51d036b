"""``CallSignature``: the key under which graphs are looked up before their guards are checked."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.runtime.autocast_guard import autocast_state
from autosplit.torch_internals.pytree import TreeSpec, tree_flatten

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES = {Tensor, nn.Parameter, *_VALUES}


class CallStructure:
    """How the leaves make up a call, as an object that hashes by identity: hashing a ``TreeSpec``
    takes microseconds.

    Attributes:
        spec: of ``(args, kwargs)``.
    """

    __slots__ = ("spec",)

    def __init__(self, spec: TreeSpec) -> None:
        self.spec = spec


class CallFlattening:
    """Flattens calls as ``tree_flatten((args, kwargs))`` does, in a tenth of its time where every
    argument is a tensor or a plain value.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, CallStructure] = {}

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], CallStructure]:
        leaves = [*args, *kwargs.values()]
        if not _LEAVES.issuperset(map(type, leaves)):
            leaves, spec = tree_flatten((args, kwargs))
            return leaves, self._one(spec, spec)
        key = (len(args), *kwargs)
        known = self._known.get(key)
        return leaves, known or self._one(key, tree_flatten((args, kwargs))[1])

    def _one(self, key: Hashable, spec: TreeSpec) -> CallStructure:
        return self._known.setdefault(key, CallStructure(spec))  # two threads get the same


class CallSignature(NamedTuple):
    """The inputs of a call as a graph is specialised for them, and the modes it runs in.

    Input structure; tensors' shape, strides, dtype, device and ``requires_grad``; numbers and
    strings by value; other objects by type, because guards look into them. Then grad mode,
    inference mode and autocast. What the graph read of the module itself is for its guards.
    """

    structure: Hashable
    leaves: tuple[Hashable, ...]
    modes: tuple[Hashable, ...]

    @classmethod
    def of(cls, leaves: list[Any], structure: Any) -> CallSignature:
        return cls(structure, tuple(map(_leaf, leaves)), _modes())

    @property
    def of_any_size(self) -> CallSignature:
        """The same without sizes and strides: what calls have in common that one graph may hold."""
        return self._replace(leaves=tuple(map(_without_sizes, self.leaves)))


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return (leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad)
    kind: Any = type(leaf)
    # 1, 1.0 and True are equal but trace to different graphs, and so do 0.0 and -0.0.
    value = repr(leaf) if isinstance(leaf, (float, complex)) else leaf
    return (kind, value) if isinstance(leaf, _VALUES) else kind


def _without_sizes(leaf: Any) -> Hashable:
    if isinstance(leaf, tuple) and isinstance(leaf[0], torch.Size):
        shape, _, *rest = leaf
        return (len(shape), *rest)
    found: Hashable = leaf
    return found


def _modes() -> tuple[Hashable, ...]:
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast_state())
