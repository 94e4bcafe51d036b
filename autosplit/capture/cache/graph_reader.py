"""``read_graph``: graphs from the pickles of ``GraphWriter``."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from .archive_names import NoArchiveError, named_constant, named_global, named_operator


class GraphReader(pickle.Unpickler):
    """An unpickler that looks up listed names only (``archive_names``)."""

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        kind, what = pid
        if kind == "node":
            return _NodeReference(what)
        if kind == "tensor":
            return self._tensors[what]
        if kind == "constant":
            return named_constant(what)
        if kind == "operator":
            return named_operator(what)
        raise NoArchiveError(f"unknown reference {pid!r}")

    def find_class(self, module: str, name: str) -> Any:
        found = named_global(module, name)
        if found is None:
            raise NoArchiveError(f"{module}.{name} is not read")
        return found


@dataclasses.dataclass(frozen=True)
class _NodeReference:
    """Reference to a node by its position in the graph."""

    at: int


def read_tensors(described: Iterable[tuple[Any, ...]], mode: FakeTensorMode) -> list[Tensor]:
    """Tensors without data, from their descriptions; those of one storage share one again."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    for storage, size, dtype, device, shape, stride, offset, gradient, parameter in described:
        if storage not in storages:
            storages[storage] = torch.UntypedStorage(size, device="meta")
        blank = torch.empty(0, dtype=named_constant(dtype), device="meta")
        with torch.no_grad():
            blank.set_(storages[storage], offset, shape, stride)
        value: Any = FakeTensor(mode, blank, torch.device(device))
        if gradient:
            value.requires_grad_()
        if parameter:
            value._is_param = True
        found.append(value)
    return found


def read_graph(
    name: str, data: bytes, tensors: list[Tensor], constants: dict[str, Tensor]
) -> fx.GraphModule:
    """One graph, with these tensors as its values, and constants by the names of their attributes.

    Raises:
        NoArchiveError: the bytes name something that is not listed.
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for op, target, wanted, args, kwargs, meta in GraphReader(data, tensors).load():
        args, kwargs = _filled(args, nodes), _filled(kwargs, nodes)
        node = graph.create_node(op, target, args, dict(kwargs), wanted)
        if node.name != wanted:
            raise NoArchiveError(f"{wanted} of {name} cannot have its name")
        node.meta = meta
        nodes.append(node)
    # Python code of the whole graph is made where somebody asks for it, which is hardly ever.
    return _LazyGraphModule(constants, graph, class_name=name)


def _filled(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, _NodeReference):
        return nodes[value.at]
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(item, nodes) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, nodes) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_filled(part, nodes) for part in (value.start, value.stop, value.step)))
    return value
