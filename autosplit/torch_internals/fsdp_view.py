"""``PlainView`` hides ``fully_shard`` from a module while a graph is captured or looked up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors

from .distributed import FSDP_MARK, is_fsdp_managed
from .fsdp import state_of

_MARKS = (FSDP_MARK, "_fsdp_use_orig_params")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def cast_hook(dtype: torch.dtype, *, output: bool) -> Callable[..., Any]:
    """A hook that casts the inputs of a forward, positional and keyword. With ``output``, it casts
    the forward's output instead.
    """

    def to(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def cast(module: nn.Module, *values: Any) -> Any:
        return _apply_to_tensors(to, values[-1] if output else values)

    return cast


class PlainView:
    """Removes from a module what ``fully_shard`` has added, and restores it.

    ``fully_shard`` adds a class, hooks and marks for Dynamo. Its hooks cannot be traced, and Dynamo
    guards too few attributes of a marked module. While FSDP's hooks are removed, traceable hooks do
    the casts of the mixed precision policy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sharded: dict[str, Any] = {}
        self._class: Any = None
        self._plain: dict[str, OrderedDict[int, Any]] = {name: OrderedDict() for name in _HOOKS}
        self._seen: dict[str, list[Any]] = {}
        state = state_of(module)
        self._casts: dict[str, Any] = dict.fromkeys(_HOOKS)
        self._ids: frozenset[int] = frozenset()
        if state is not None:
            self._ids = frozenset(_handle_ids(state))
            policy = state._mp_policy
            if policy.cast_forward_inputs and policy.param_dtype:
                self._casts["_forward_pre_hooks"] = cast_hook(policy.param_dtype, output=False)
            if policy.output_dtype is not None:
                self._casts["_forward_hooks"] = cast_hook(policy.output_dtype, output=True)

    def enter(self) -> None:
        attributes = self._module.__dict__
        self._sharded = {name: attributes.pop(name) for name in _MARKS if name in attributes}
        if self._ids:
            self._class = type(self._module)
            self._module.__class__ = self._class.__bases__[1]
            for name in _HOOKS:
                self._sharded[name] = attributes[name]
                attributes[name] = self._without(name, attributes[name])

    def leave(self) -> None:
        self._module.__dict__.update(self._sharded)
        if self._class is not None:
            self._module.__class__ = self._class
        self._sharded, self._class = {}, None

    def _without(self, name: str, hooks: OrderedDict[int, Any]) -> OrderedDict[int, Any]:
        """The hooks, in which casts replace FSDP's hooks. Without a cast, FSDP's hooks are left
        out.

        Each call returns the same dictionary, because guards may refer to it.
        """
        plain, items = self._plain[name], list(hooks.items())
        if self._seen.get(name) != items:
            self._seen[name] = items
            plain.clear()
            for key, hook in items:
                if key not in self._ids:
                    plain[key] = hook
                elif self._casts[name] is not None:
                    plain[key] = self._casts[name]
        return plain


def is_managed(module: nn.Module) -> bool:
    """Whether ``fully_shard`` has marked this module or given it a state."""
    return is_fsdp_managed(module) or state_of(module) is not None


def _handle_ids(state: Any) -> list[int]:
    """Ids of the handles of FSDP's forward pre-hooks and forward hooks."""
    ids = []
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        ids += [part.id for part in getattr(handle, "handles", (handle,))]
    return ids
