"""Modules that are graphs themselves: ``torch.fx``'s, those of ``torch.export``, and stages that
``torch.distributed.pipelining.pipeline`` cuts.

Torch gives the graph that it captured the attributes of the module that it captured it from. Of a
``GraphModule`` these are a graph as well, which then stands in for the captured one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import fx, nn

if TYPE_CHECKING:
    from torch._dynamo.convert_frame import BackendInput


@contextlib.contextmanager
def graph_put_aside(module: nn.Module, captured: BackendInput | None) -> Iterator[None]:
    """The module is without those attributes that make a graph of it, and that the captured graph
    has its own of.
    """
    taken: dict[str, Any] = {}
    if captured is not None and isinstance(module, fx.GraphModule):
        own = vars(captured.graph_module).keys() - nn.Module().__dict__.keys()
        taken = {name: vars(module).pop(name) for name in own & vars(module).keys()}
    try:
        yield
    finally:
        vars(module).update(taken)
