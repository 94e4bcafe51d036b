"""``read_graph``: graphs from the pickles of ``GraphWriter``."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from .archive_names import NoArchiveError, named_constant, named_global, named_operator


class GraphReader(pickle.Unpickler):
    """An unpickler that looks up listed names only (``archive_names``).

    Args:
        data: written by a ``GraphWriter``.
        tensors: that the graph refers to.
        nodes: that the graph has so far.
        numbers: that follow from open sizes.
    """

    def __init__(
        self,
        data: bytes,
        tensors: Sequence[Tensor] = (),
        nodes: Sequence[fx.Node] = (),
        numbers: Sequence[Any] = (),
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._referred = {"node": nodes, "tensor": tensors, "number": numbers}
        self._named: dict[Any, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, what = pid
        if kind in self._referred:
            return self._referred[kind][what]
        if pid not in self._named:
            if kind not in _NAMED:
                raise NoArchiveError(f"unknown reference {pid!r}")
            self._named[pid] = _NAMED[kind](what)
        return self._named[pid]

    def find_class(self, module: str, name: str) -> Any:
        found = named_global(module, name)
        if found is None:
            raise NoArchiveError(f"{module}.{name} is not read")
        return found


_NAMED: dict[str, Callable[[str], Any]] = {
    "constant": named_constant,
    "operator": named_operator,
}


def read_tensors(
    described: Iterable[tuple[Any, ...]], mode: FakeTensorMode, numbers: Sequence[Any] = ()
) -> list[Tensor]:
    """Tensors without data, from their descriptions; those of one storage share one again.

    Args:
        described: the descriptions.
        mode: of the tensors.
        numbers: that follow from open sizes.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    found = []

    def sizes(written: Iterable[Any]) -> list[Any]:
        return [size if type(size) is int else numbers[size[0]] for size in written]

    # Laying tensors out asks about sizes; what the graph assumes of them is known.
    quiet = mode.shape_env.suppress_guards if numbers and mode.shape_env else contextlib.nullcontext
    with torch.no_grad(), quiet():
        for storage, size, dtype, device, shape, stride, offset, gradient, parameter in described:
            (count, start), lengths, steps = sizes((size, offset)), sizes(shape), sizes(stride)
            if storage not in storages:
                storages[storage] = _storage(count)
            blank = torch.empty(0, dtype=named_constant(dtype), device="meta")
            blank.set_(storages[storage], start, lengths, steps)
            value: Any = FakeTensor(mode, blank, torch.device(device))
            if gradient:
                value.requires_grad_()
            if parameter:
                value._is_param = True
            found.append(value)
    return found


def _storage(count: Any) -> torch.UntypedStorage:
    """A storage of so many bytes, without memory."""
    if type(count) is int:
        return torch.UntypedStorage(count, device="meta")
    return torch.empty((count,), dtype=torch.uint8, device="meta").untyped_storage()


def read_graph(
    name: str,
    data: bytes,
    tensors: list[Tensor],
    constants: dict[str, Tensor],
    numbers: Sequence[Any] = (),
) -> fx.GraphModule:
    """One graph, with these tensors and numbers as its values, and constants by the names of their
    attributes.

    Raises:
        NoArchiveError: the bytes name something that is not listed.
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    reader = GraphReader(data, tensors, nodes, numbers)
    for _ in range(reader.load()):
        op, target, wanted, args, kwargs, meta = reader.load()
        node = graph.create_node(op, target, (), {}, wanted)
        if node.name != wanted:
            raise NoArchiveError(f"{wanted} of {name} cannot have its name")
        # Given to begin with, they would be searched for symbols, which only values have; and a
        # node that is given an attribute leaves its graph's tables of nodes and enters them again.
        node._update_args_kwargs(args, kwargs)
        node.meta.update(meta)
        nodes.append(node)
    # Python code of the whole graph is made where somebody asks for it, which is hardly ever.
    return _LazyGraphModule(constants, graph, class_name=name)
