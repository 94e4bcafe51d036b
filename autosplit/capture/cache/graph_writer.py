"""``GraphWriter``: graphs as pickles in which values without data are descriptions."""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from autosplit.passes.analysis.operators import OVERLOAD

from .archive_names import CLASSES, CONSTANTS, EXCHANGES, NoArchiveError, is_known, named_global
from .constant_data import describe_constant, is_plain
from .size_expressions import Form
from .size_symbols import NUMBERS, SizeSymbols

_NUMBERS = tuple(symbolic for _, symbolic in NUMBERS.values())

# Metadata of the user's modules and of other graphs, or implied by the value; not read by passes
# and backends.
_FORGOTTEN = frozenset(
    {
        "ac_graph_id",
        "desc",
        "from_node",
        "fwd_nn_module_stack",
        "fwd_source_fn_stack",
        "fwd_torch_fn",
        "nn_module_stack",
        "partitioner_tag",
        "recompute",
        "source_fn_stack",
        "tensor_meta",
        "torch_fn",
    }
)


class GraphWriter:
    """Writes graphs that share tensors.

    Args:
        groups: names of the process groups that graphs may exchange tensors in: those that who
            reads them knows, too.
        symbols: sizes that are left open.

    Attributes:
        tensors: descriptions of the tensors of all graphs written, each once.
        numbers: how sizes and other numbers follow from sizes that are left open, each once.
        constants: of the tensors with data that the graphs read, each once.
    """

    def __init__(self, groups: Collection[str] = (), symbols: SizeSymbols | None = None) -> None:
        self._groups = groups
        self._symbols = symbols
        self.tensors: list[tuple[Any, ...]] = []
        self.numbers: list[tuple[str, Form]] = []
        self._places: dict[tuple[str, Form], int] = {}
        self.constants: list[tuple[Any, ...]] = []
        self._kept: dict[int, tuple[int, Tensor]] = {}
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._strings: dict[str, str] = {}

    def graph(self, module: fx.GraphModule) -> tuple[dict[str, int], bytes]:
        """Which constants a graph reads, and its nodes.

        Raises:
            NoArchiveError: the graph holds something that cannot be archived.
        """
        graph, stream = module.graph, io.BytesIO()
        constants = {
            str(node.target): self._constant(str(node.target), module)
            for node in graph.nodes
            if node.op == "get_attr"
        }
        places = {node: at for at, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            if node.op == "call_module":
                raise NoArchiveError("the graphs call modules")
            self._check_group(node)
        try:
            # One record a node: its reader has all operands when it comes to a node.
            pickler = _Pickler(stream, self, places)
            pickler.dump(len(places))
            for node in graph.nodes:
                meta = self._meta(node)
                pickler.dump((node.op, node.target, node.name, node.args, node.kwargs, meta))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise NoArchiveError(str(error)) from error
        return constants, stream.getvalue()

    def _check_group(self, node: fx.Node) -> None:
        """Refuse an exchange in a group that could be another one where the graph is read."""
        target: Any = node.target
        if not isinstance(target, OVERLOAD) or target.namespace not in EXCHANGES:
            return
        named = zip((each.name for each in target._schema.arguments), node.args, strict=False)
        group = {**dict(named), **node.kwargs}.get("group_name")
        if group is not None and group not in self._groups:
            raise NoArchiveError(f"{target} is in the group {group!r}, of no DTensor's mesh")

    def _constant(self, target: str, module: fx.GraphModule) -> int:
        """Index of a tensor that tracing made: the module's own have no fingerprint."""
        tensor = operator.attrgetter(target)(module)
        if type(tensor) is not Tensor or not is_plain(tensor):
            raise NoArchiveError(f"the graphs hold a {type(tensor).__name__} as a constant")
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = len(self.constants), tensor
            self.constants.append(describe_constant(tensor))
        return self._kept[id(tensor)][0]

    def symbolic(self, number: Any) -> int:
        """Index of the number that follows from open sizes."""
        if self._symbols is None:
            raise NoArchiveError("sizes are symbolic")
        form = self._symbols.write(number)
        if form not in self._places:
            self._places[form] = len(self.numbers)
            self.numbers.append(form)
        return self._places[form]

    def _size(self, size: Any) -> Any:
        """An integer as it is, another in a tuple."""
        return size if type(size) is int else (self.symbolic(size),)

    def number(self, tensor: Tensor) -> int:
        """Index of the tensor's description."""
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
        return (
            self._storages.setdefault(storage._cdata, len(self._storages)),
            self._size(storage.nbytes()),
            str(tensor.dtype).removeprefix("torch."),
            str(tensor.device),
            tuple(map(self._size, tensor.shape)),
            tuple(map(self._size, tensor.stride())),
            self._size(tensor.storage_offset()),
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
        )


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, writer: GraphWriter, places: dict[fx.Node, int]) -> None:
        super().__init__(stream, protocol=5)
        self._writer = writer
        self._places = places

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, fx.Node):
            return "node", self._places[obj]
        if isinstance(obj, Tensor):
            return "tensor", self._writer.number(obj)
        if isinstance(obj, _NUMBERS):
            return "number", self._writer.symbolic(obj)
        if isinstance(obj, CONSTANTS):
            return "constant", str(obj).removeprefix("torch.")
        if isinstance(obj, OVERLOAD):
            if not is_known(obj.name()):
                raise NoArchiveError(f"{obj} is a custom operator that is not made in Python")
            return "operator", obj.name()
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Asked of everything but plain values."""
        where = (getattr(obj, "__module__", None), getattr(obj, "__qualname__", None))
        if type(obj) in CLASSES or named_global(*where) is obj:
            return NotImplemented
        raise NoArchiveError(f"the graphs hold a {type(obj).__module__}.{type(obj).__qualname__}")
