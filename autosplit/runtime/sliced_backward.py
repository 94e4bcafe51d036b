"""``SlicedBackward``: the fused backward as graphs that run in turn, each of which completes some
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from torch import fx

from autosplit.backends.backend import Backend
from autosplit.passes import Kind, Role
from autosplit.passes.graph import inputs, outputs

from .compiled_graph import CompiledGraph, compile_graph


class SlicedBackward:
    """The slices of one fused backward.

    Args:
        modules: the slices, in order.
        backend: compiles them.

    Attributes:
        parameters: for each slice, names of the parameters whose gradients it completes.
    """

    def __init__(self, modules: Sequence[fx.GraphModule], backend: Backend) -> None:
        self._modules, self._backend = modules, backend
        self._last = {role: at for at, part in enumerate(modules) for role in inputs(part.graph)}
        self.parameters = [
            [role.name for role, _ in outputs(part.graph, Kind.PARAMETER_GRAD)] for part in modules
        ]

    @cached_property
    def _graphs(self) -> list[CompiledGraph]:
        """The compiled slices. They are compiled when first read, and never if there is only one
        slice.
        """
        return [
            compile_graph(f"backward_slice_{at}", module, self._backend)
            for at, module in enumerate(self._modules)
        ]

    def run(self, pool: dict[Role, Any]) -> Iterator[dict[Role, Any]]:
        """Run the slices in order, one for each item of the iterator.

        Args:
            pool: arguments by role; each is dropped when the last slice that reads it takes it.

        Yields:
            the gradients that the slice completes, by role.
        """
        for at, graph in enumerate(self._graphs):
            take = [pool.pop if self._last[role] == at else pool.get for role in graph.inputs]
            call = graph.call([take(role) for take, role in zip(take, graph.inputs, strict=True)])
            results = dict(zip(graph.outputs, call, strict=True))
            del call
            carried = [role for role in results if role.kind is Kind.SAVED]
            pool |= {role: results.pop(role) for role in carried}
            yield results
