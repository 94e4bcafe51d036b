"""Captures see the default device that is set, as compilations do.

``torch.set_default_device`` and ``with torch.device(...)`` put a mode on a stack that
``torch.compile`` puts aside before it traces, and writes down for the graph and its guards.
``fullgraph_capture`` does not, but in torch 2.11: what it writes down is that there is none, which
the guards then find to be wrong where they are made ("Guard failed on the same frame it was
created").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CodeType

from torch._dynamo.convert_frame import preserve_global_state
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr


def _by_captures() -> bool:
    """Whether captures do it themselves; twice, modes would be lost."""
    inner = preserve_global_state.__code__.co_consts
    codes = [each for each in inner if isinstance(each, CodeType)]
    return any("torch_function_mode_stack_state_mgr" in each.co_names for each in codes)


@contextlib.contextmanager
def function_modes_known() -> Iterator[None]:
    """Put modes aside for a capture, which knows of them; also inside of a compilation."""
    if _by_captures():
        yield
        return
    outer = torch_function_mode_stack_state_mgr.stack
    try:
        with torch_function_mode_stack_state_mgr:
            yield
    finally:
        torch_function_mode_stack_state_mgr.stack = outer
