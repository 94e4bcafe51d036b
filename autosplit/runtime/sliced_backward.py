"""``SlicedBackward``: the fused backward as slices, each with the gradients that it completes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from autosplit.backends.backend import Backend
from autosplit.passes import Kind, Role

from .compiled_graph import compile_graph


class SlicedBackward:
    """The slices of one fused backward, compiled.

    Args:
        modules: the slices, in order.
        backend: compiles them.

    Attributes:
        parameters: for each slice, names of the parameters whose gradients it completes.
    """

    def __init__(self, modules: Sequence[fx.GraphModule], backend: Backend) -> None:
        self._graphs = [
            compile_graph(f"backward_slice_{at}", module, backend)
            for at, module in enumerate(modules)
        ]
        self._last = {role: at for at, graph in enumerate(self._graphs) for role in graph.inputs}
        self.parameters = [
            [role.name for role in graph.outputs if role.kind is Kind.PARAMETER_GRAD]
            for graph in self._graphs
        ]

    def run(self, pool: dict[Role, Any]) -> Iterator[dict[Role, Any]]:
        """Run a slice for each item that is asked for.

        Args:
            pool: arguments by role; each is dropped as its last slice takes it.

        Yields:
            the gradients of the slice.
        """
        for at, graph in enumerate(self._graphs):
            take = [pool.pop if self._last[role] == at else pool.get for role in graph.inputs]
            call = graph.call([take(role) for take, role in zip(take, graph.inputs, strict=True)])
            results = dict(zip(graph.outputs, call, strict=True))
            del call
            carried = [role for role in results if role.kind is Kind.SAVED]
            pool |= {role: results.pop(role) for role in carried}
            yield results
