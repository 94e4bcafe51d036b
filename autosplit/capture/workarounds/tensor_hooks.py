"""Refusal of hooks that a forward registers on tensors it did not compute.

Dynamo has a hook on what it traced in the graph; one on an input, a parameter or a buffer it
registers in code around the graph, which an export leaves out without a word.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch._dynamo.side_effects import SideEffects
from torch._guards import TracingContext

from autosplit.errors import CaptureError


@contextlib.contextmanager
def refuse_lost_hooks() -> Iterator[None]:
    """Around a capture by Dynamo.

    Raises:
        CaptureError: a hook would be lost; names the line that registers it.
    """
    lines: dict[int, str] = {}
    register: Any = SideEffects.register_hook
    remove: Any = SideEffects.remove_hook

    def register_hook(effects: Any, tensor: Any, hook: Any, handle: Any, name: str) -> None:
        register(effects, tensor, hook, handle, name)
        if tensor.source is not None:
            lines[handle.idx] = _current_line()

    def remove_hook(effects: Any, number: int) -> None:
        remove(effects, number)
        lines.pop(number, None)

    with (
        patch.object(SideEffects, "register_hook", register_hook),
        patch.object(SideEffects, "remove_hook", remove_hook),
    ):
        yield
    for line in lines.values():
        raise CaptureError(
            f"{line} registers a hook on a tensor that the forward did not compute, which no graph "
            "can hold. Register it on a view of its own, as in x = x.view_as(x), or outside of the "
            "forward"
        )


def _current_line() -> str:
    """Where the user's code is being traced."""
    for frame in reversed(TracingContext.extract_stack()):
        return f"{os.path.basename(frame.filename)}:{frame.lineno}: {(frame.line or '').strip()}"
    return "the forward"
