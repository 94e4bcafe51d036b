"""Slices of module lists, which Dynamo traces without torch's checks of each module.

``model.layers[:depth]`` makes a new ``nn.ModuleList``, which checks the name and type of each
module in Python. Dynamo traces these checks, which takes as long as the call of a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._dynamo.variables import (
    ListVariable,
    UnspecializedNNModuleVariable,
    UserFunctionVariable,
    UserMethodVariable,
)
from torch.nn.modules.module import _global_module_registration_hooks

from autosplit.torch_internals.patches import patched


@contextlib.contextmanager
def slice_module_lists() -> Iterator[None]:
    """Context in which an ``nn.ModuleList`` is extended by a list of modules without checks."""
    original: Any = UserFunctionVariable.call_function

    def call_function(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call, with another function in place of ``nn.ModuleList.extend``."""
        is_extend = getattr(function, "fn", None) is nn.ModuleList.extend and not kwargs
        if is_extend and function.obj.python_type() is nn.ModuleList and _are_modules(*args):
            function = UserMethodVariable(_extend, function.obj)
        return original(function, tx, args, kwargs)

    with patched(UserFunctionVariable, "call_function", call_function):
        yield


def _are_modules(elements: Any) -> bool:
    return isinstance(elements, ListVariable) and all(
        isinstance(item.realize(), UnspecializedNNModuleVariable) for item in elements.items
    )


def _extend(container: nn.ModuleList, modules: list[nn.Module]) -> nn.ModuleList:
    if len(container) or _global_module_registration_hooks:
        for module in modules:
            container.append(module)
    else:
        names = map(str, range(len(modules)))
        container._modules.update(zip(names, modules, strict=True))
    return container
