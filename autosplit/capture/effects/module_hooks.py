"""Hooks on modules, and where the user defined them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

_TORCH = os.path.dirname(torch.__file__) + os.sep


class ModuleHook(NamedTuple):
    """A hook on a module.

    Attributes:
        owner: name of the submodule that has it; empty for the module itself, None for one that
            all modules have.
        kind: class of that.
        function: what is called.
    """

    owner: str | None
    kind: str
    function: Any

    @property
    def line(self) -> str:
        """``file:line`` of its definition, or an empty string."""
        function = inspect.unwrap(getattr(self.function, "func", self.function))
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            function = type(function).__call__ if callable(function) else function
        code = getattr(function, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else ""

    def __str__(self) -> str:
        if self.owner is None:
            return "every module (torch.nn.modules.module)"
        return f"{self.owner} ({self.kind})" if self.owner else self.kind


def backward_hook(module: nn.Module) -> ModuleHook | None:
    """The first hook on the backward of a module or of all modules; no graph holds one."""
    everywhere = (
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )
    for table in everywhere:
        for hook in table.values():
            return ModuleHook(None, "", hook)
    return next(_hooks(module, "_backward_hooks", "_backward_pre_hooks"), None)


def forward_hook(module: nn.Module) -> ModuleHook | None:
    """The first hook on the forward of a module or of one below it that is not torch's own."""
    found = _hooks(module, "_forward_hooks", "_forward_pre_hooks")
    return next((hook for hook in found if hook.line and not is_torch_file(hook.line)), None)


def norm_hook(module: nn.Module) -> str:
    """``weight_norm`` or ``spectral_norm``, where a module has one as a hook: both are deprecated
    for parametrizations. Else an empty string.
    """
    for hook in _hooks(module, "_forward_pre_hooks"):
        place = type(hook.function).__module__
        if place in {"torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm"}:
            return place.rpartition(".")[2]
    return ""


def is_torch_file(path: str) -> bool:
    """Whether a file is torch's."""
    return path.startswith(_TORCH)


def _hooks(module: nn.Module, *tables: str) -> Iterator[ModuleHook]:
    for name, part in module.named_modules():
        for table in tables:
            for hook in getattr(part, table, {}).values():
                yield ModuleHook(name, type(part).__name__, hook)
