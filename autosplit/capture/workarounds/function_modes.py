"""Captures see the default device that is set, as compilations do.

``torch.set_default_device`` and ``with torch.device(...)`` put a mode on a stack that
``torch.compile`` puts aside before it traces, and writes down for the graph and its guards.
``fullgraph_capture`` does not: what it writes down is that there is none, which the guards then
find to be wrong where they are made ("Guard failed on the same frame it was created").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr


@contextlib.contextmanager
def function_modes_known() -> Iterator[None]:
    """Put modes aside for a capture, which knows of them; also inside of a compilation."""
    outer = torch_function_mode_stack_state_mgr.stack
    try:
        with torch_function_mode_stack_state_mgr:
            yield
    finally:
        torch_function_mode_stack_state_mgr.stack = outer
