"""Hooks with which models of transformers collect hidden states and attentions.

transformers puts them on the layers in the first call that asks for either, under a lock, which no
graph can hold. So they are put there before; in calls that do not ask they do nothing.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

_LIBRARY = "transformers.utils.output_capturing"


def install_output_hooks(module: nn.Module, error: Exception) -> bool:
    """Install the hooks whose installation made tracing fail.

    Args:
        module: what was traced.
        error: what tracing raised.

    Returns:
        Whether another try is worth while.
    """
    library = sys.modules.get(_LIBRARY)
    stack = getattr(error, "real_stack", None)  # Dynamo's, the user's frames
    if library is None or not stack or stack[-1].filename != library.__file__:
        return False
    install = getattr(library, "maybe_install_capturing_hooks", None)
    parts = [part for part in module.modules() if _collects(part, stack[-1].filename)]
    if install is None or not parts:
        return False
    for part in parts:
        install(part)
    return True


def _collects(part: nn.Module, file: str) -> bool:
    """Whether one of the decorators of the module's forward is of the library that collects."""
    forward: Any = type(part).forward
    while forward is not None:
        if inspect.isfunction(forward) and forward.__code__.co_filename == file:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
