"""Modules of ``fully_shard`` as plain ones, while a graph of them is captured or looked up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors

from .groups import state_of

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def _cast_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _casted(dtype, args), _casted(dtype, kwargs)

    return cast


def _cast_output(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(module: nn.Module, args: Any, output: Any) -> Any:
        return _casted(dtype, output)

    return cast


def _casted(dtype: torch.dtype, tree: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, tree)


class PlainView:
    """Takes from one module what ``fully_shard`` has put on it, and gives it back: its class, its
    hooks and its marks for Dynamo, which makes guards of a managed module's attributes too few.
    What the mixed precision policy casts is cast by hooks that can be traced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sharded: dict[str, Any] = {}
        self._class: Any = None
        self._plain: dict[str, OrderedDict[int, Any]] = {name: OrderedDict() for name in _HOOKS}
        self._seen: dict[str, list[Any]] = {}
        state = _state_of(module)
        self._casts: dict[str, Any] = dict.fromkeys(_HOOKS)
        self._ids: frozenset[int] = frozenset()
        if state is not None:
            self._ids = frozenset(_handle_ids(state))
            policy = state._mp_policy
            if policy.cast_forward_inputs and policy.param_dtype:
                self._casts["_forward_pre_hooks"] = _cast_inputs(policy.param_dtype)
            if policy.output_dtype is not None:
                self._casts["_forward_hooks"] = _cast_output(policy.output_dtype)

    def enter(self) -> None:
        own = self._module.__dict__
        self._sharded = {name: own.pop(name) for name in _MARKS if name in own}
        if self._ids:
            self._class = type(self._module)
            self._module.__class__ = self._class.__bases__[1]
            for name in _HOOKS:
                self._sharded[name] = own[name]
                own[name] = self._without(name, own[name])

    def leave(self) -> None:
        self._module.__dict__.update(self._sharded)
        if self._class is not None:
            self._module.__class__ = self._class
        self._sharded, self._class = {}, None

    def _without(self, name: str, hooks: OrderedDict[int, Any]) -> OrderedDict[int, Any]:
        """The hooks, FSDP's replaced; the same dictionary as before, as guards may hold it."""
        plain, found = self._plain[name], list(hooks.items())
        if self._seen.get(name) != found:
            self._seen[name] = found
            plain.clear()
            for key, hook in found:
                if key not in self._ids:
                    plain[key] = hook
                elif self._casts[name] is not None:
                    plain[key] = self._casts[name]
        return plain


def is_managed(module: nn.Module) -> bool:
    """Whether ``fully_shard`` has left anything on this module."""
    return _MARKS[0] in module.__dict__ or _state_of(module) is not None


def _state_of(module: nn.Module) -> Any:
    return state_of(module) if hasattr(module, "_get_fsdp_state") else None


def _handle_ids(state: Any) -> list[int]:
    """Numbers of the hooks on forwards; one object may stand for many, and twice for the same."""
    ids = []
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        ids += [each.id for each in getattr(handle, "handles", (handle,))]
    return ids
