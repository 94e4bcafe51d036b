"""Copies of models without the memory of their parameters."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autosplit.planner.meta_init.meta_model import alike


class NotCopiedError(Exception):
    """A model cannot be copied so that the copy stands for it."""


def bare_copy(model: nn.Module) -> nn.Module:
    """A copy of a model as it is now, to be traced later: parameters are on the meta device, all
    other tensors are the model's own. It holds nothing of the model's parameters.

    Raises:
        NotCopiedError: something that hangs on the model cannot be copied, or leads back to it.
    """
    parameters = {id(p): p for p in model.parameters()}
    memo: dict[int, Any] = {key: _without_values(p) for key, p in parameters.items()}
    try:
        with _OwnTensors():
            copied = copy.deepcopy(model, memo)
    except Exception as error:  # whatever the user's objects raise
        raise NotCopiedError(f"{type(model).__name__} cannot be copied: {error}") from error
    originals = parameters.keys() | {id(module) for module in model.modules()}
    if not isinstance(copied, nn.Module) or _reaches(copied, originals):
        raise NotCopiedError(f"a copy of {type(model).__name__} leads back to what it is of")
    return copied


def _without_values(parameter: nn.Parameter) -> Tensor:
    if is_lazy(parameter) or type(parameter) is not nn.Parameter or _is_subclass(parameter.data):
        raise NotCopiedError(f"a parameter is a {type(parameter.data).__name__}")
    return alike(torch.empty_like(parameter, device="meta"), parameter)


def _is_subclass(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor


class _OwnTensors(TorchFunctionMode):
    """Inside, a copy has the tensors that what it is of has; nothing computes with any."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0]
        raise NotCopiedError(f"copying it calls {getattr(func, '__name__', func)}")


# What code can read in them belongs to the process, not to the object that is looked at.
_SHARED = (type, ModuleType, CodeType, BuiltinFunctionType, logging.Logger, str, bytes, int, float)


def _reaches(start: object, wanted: set[int]) -> bool:
    """Whether one leads from an object to one of these, by attributes, items and closures."""
    seen: dict[int, object] = {}  # alive, so that no other object gets its number
    waiting = [start]
    while waiting:
        found = waiting.pop()
        if id(found) in wanted:
            return True
        if id(found) in seen or isinstance(found, _SHARED):
            continue
        seen[id(found)] = found
        if isinstance(found, FunctionType):
            waiting += [found.__closure__, found.__defaults__, found.__kwdefaults__, vars(found)]
        elif not isinstance(found, Tensor):
            waiting += gc.get_referents(found)
    return False
