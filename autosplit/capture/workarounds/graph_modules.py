"""Modules that are graphs themselves: ``torch.fx``'s, those of ``torch.export``, and the stages that
``torch.distributed.pipelining.pipeline`` cuts.

Torch gives the graph that it captured the attributes of the module that it captured it from. Of a
``GraphModule`` these are a graph as well, which then stands in for the captured one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx, nn


@contextlib.contextmanager
def graph_put_aside(module: nn.Module, captured: fx.GraphModule | None) -> Iterator[None]:
    """The module is without those attributes that make a graph of it, and that the captured graph
    has its own of.
    """
    taken: dict[str, Any] = {}
    if captured is not None and isinstance(module, fx.GraphModule):
        own = vars(captured).keys() - nn.Module().__dict__.keys()
        taken = {name: vars(module).pop(name) for name in own & vars(module).keys()}
    try:
        yield
    finally:
        vars(module).update(taken)
