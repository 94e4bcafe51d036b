"""Split graphs <-> bytes.

Values without data become descriptions; operators and types are named, and only those that are
listed here are looked up when bytes are read, so that reading runs nobody's code. A graph that
holds anything else (tensors of the module, bodies of higher-order operators, symbolic sizes) has
no such form.
"""

from __future__ import annotations

import dataclasses
import io
import operator
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils.checkpoint import CheckpointPolicy

from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.analysis.operators import OVERLOAD
from autosplit.passes.memory_policy import Memory

# Of the user's modules and of other graphs, or said by the value; no pass and no backend asks.
_FORGOTTEN = frozenset(
    {
        "desc",
        "from_node",
        "fwd_nn_module_stack",
        "fwd_source_fn_stack",
        "fwd_torch_fn",
        "nn_module_stack",
        "source_fn_stack",
        "tensor_meta",
        "torch_fn",
    }
)
_NAMESPACES = frozenset({"aten", "prims"})
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
_CLASSES = (
    CheckpointPolicy,
    Kind,
    Role,
    immutable_dict,
    immutable_list,
    torch.Size,
    torch.device,
    complex,
    range,
    slice,
)
_KNOWN = {(each.__module__, each.__qualname__): each for each in _CLASSES}


class NoArchiveError(Exception):
    """Something in the graphs has no form as bytes; says what."""


def pack_graphs(graphs: SplitGraphs) -> bytes:
    """The graphs as bytes, from which ``unpack_graphs`` was seen to make the same graphs.

    Raises:
        NoArchiveError: they hold something that has no such form.
    """
    writer = _Writer()
    memory = dataclasses.astuple(graphs.memory)
    nodes = {name: writer.nodes(module.graph) for name, module in graphs.graphs().items()}
    data = pickle.dumps((memory, writer.tensors, nodes))
    values = [node.meta.get("val") for node in graphs.forward.graph.nodes]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    twin = unpack_graphs(data, mode).graphs()
    for name, module in graphs.graphs().items():
        if _text(module) != _text(twin[name]):
            raise NoArchiveError(f"{name} is read back as another graph")
    return data


def unpack_graphs(data: bytes, mode: FakeTensorMode) -> SplitGraphs:
    """The graphs that ``pack_graphs`` made bytes of, with values of this fake mode.

    Raises:
        NoArchiveError: they were not written by this version.
    """
    try:
        memory, described, nodes = _Reader(data, []).load()
        tensors = _tensors(described, mode)
        graphs = {name: _graph(name, each, tensors) for name, each in nodes.items()}
        fields = [field.name for field in dataclasses.fields(SplitGraphs)]
        made: dict[str, Any] = {name: graphs.get(name) for name in fields}
        return SplitGraphs(**{**made, "memory": Memory(*memory)})
    except NoArchiveError:
        raise
    except Exception as error:
        raise NoArchiveError(f"{type(error).__name__}: {error}") from error


class _Writer:
    """Attributes:
    tensors: descriptions of all tensors that were met, each once.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[Any, ...]] = []
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._strings: dict[str, str] = {}

    def nodes(self, graph: fx.Graph) -> bytes:
        stream = io.BytesIO()
        places = {node: at for at, node in enumerate(graph.nodes)}
        records = [
            (node.op, node.target, node.name, node.args, node.kwargs, self._meta(node))
            for node in graph.nodes
        ]
        if any(node.op in {"get_attr", "call_module"} for node in graph.nodes):
            raise NoArchiveError("the graphs read tensors or modules besides inputs and state")
        try:
            _Pickler(stream, self, places).dump(records)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise NoArchiveError(str(error)) from error
        return stream.getvalue()

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self.tensors.append(self._describe(tensor))
            self._numbers[id(tensor)] = len(self._numbers)
        return self._numbers[id(tensor)]

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        """Equal texts (of source lines) become one, which is written once."""
        kept = {key: value for key, value in node.meta.items() if key not in _FORGOTTEN}
        return {
            key: self._strings.setdefault(value, value) if type(value) is str else value
            for key, value in kept.items()
        }

    def _describe(self, tensor: Tensor) -> tuple[Any, ...]:
        plain = type(tensor) is FakeTensor and tensor.layout is torch.strided
        if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            raise NoArchiveError(f"a value is a {type(tensor).__name__} of a kind of its own")
        storage = tensor.untyped_storage()
        sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset(), storage.nbytes())
        if any(type(size) is not int for size in sizes):
            raise NoArchiveError("sizes are symbolic")
        return (
            self._storages.setdefault(storage._cdata, len(self._storages)),
            sizes[-1],
            str(tensor.dtype).removeprefix("torch."),
            str(tensor.device),
            tuple(tensor.shape),
            tensor.stride(),
            sizes[-2],
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
        )


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, writer: _Writer, places: dict[fx.Node, int]) -> None:
        super().__init__(stream, protocol=5)
        self._writer = writer
        self._places = places

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, fx.Node):
            return "node", self._places[obj]
        if isinstance(obj, Tensor):
            return "tensor", self._writer.number(obj)
        if isinstance(obj, _CONSTANTS):
            return "constant", str(obj).removeprefix("torch.")
        if isinstance(obj, OVERLOAD):
            if obj.namespace not in _NAMESPACES:
                raise NoArchiveError(f"{obj} is a custom operator")
            return "operator", obj.name()
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Asked of everything but plain values."""
        where = (getattr(obj, "__module__", None), getattr(obj, "__qualname__", None))
        if type(obj) in _CLASSES or _global(*where) is obj:
            return NotImplemented
        raise NoArchiveError(f"the graphs hold a {type(obj).__module__}.{type(obj).__qualname__}")


class _Reader(pickle.Unpickler):
    """Knows no more names than are listed above."""

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
            return _constant(what)
        if kind == "operator":
            return _operator(what)
        raise NoArchiveError(f"unknown reference {pid!r}")

    def find_class(self, module: str, name: str) -> Any:
        found = _global(module, name)
        if found is None:
            raise NoArchiveError(f"{module}.{name} is not read")
        return found


@dataclasses.dataclass(frozen=True)
class _NodeReference:
    """A node, by its place in the graph."""

    at: int


def _global(module: str | None, name: str | None) -> Any:
    """What may be named in an archive: a class of the list, or a function of ``operator``."""
    if module in {"operator", "_operator"} and name in operator.__all__:
        found = getattr(operator, name)
        return None if isinstance(found, type) else found
    return _KNOWN.get((module or "", name or ""))


def _constant(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _CONSTANTS):
        raise NoArchiveError(f"torch.{name} is not read")
    return found


def _operator(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    if namespace not in _NAMESPACES:
        raise NoArchiveError(f"{name} is a custom operator")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _tensors(described: Iterable[tuple[Any, ...]], mode: FakeTensorMode) -> list[Tensor]:
    """Tensors without data; those of one storage share one again."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    for storage, size, dtype, device, shape, stride, offset, gradient, parameter in described:
        if storage not in storages:
            storages[storage] = torch.UntypedStorage(size, device="meta")
        blank = torch.empty(0, dtype=_constant(dtype), device="meta")
        with torch.no_grad():
            blank.set_(storages[storage], offset, shape, stride)
        value: Any = FakeTensor(mode, blank, torch.device(device))
        if gradient:
            value.requires_grad_()
        if parameter:
            value._is_param = True
        found.append(value)
    return found


def _graph(name: str, data: bytes, tensors: list[Tensor]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for op, target, wanted, args, kwargs, meta in _Reader(data, tensors).load():
        args, kwargs = _filled(args, nodes), _filled(kwargs, nodes)
        node = graph.create_node(op, target, args, dict(kwargs), wanted)
        if node.name != wanted:
            raise NoArchiveError(f"{wanted} of {name} cannot have its name")
        node.meta = meta
        nodes.append(node)
    # Python code of the whole graph is made where somebody asks for it, which is hardly ever.
    return _LazyGraphModule({}, graph, class_name=name)


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


def _text(module: fx.GraphModule) -> list[str]:
    return [
        f"{n.op} {n.target} {n.name} {n.args} {n.kwargs} {_value(n)} {n.meta.get('role')} "
        f"{n.meta.get('roles')}"
        for n in module.graph.nodes
    ]


def _value(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [
        (v.dtype, v.device, v.shape, v.stride(), v.storage_offset(), v.requires_grad)
        if isinstance(v, Tensor)
        else v
        for v in values
    ]
