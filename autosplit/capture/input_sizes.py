"""``InputSizes`` reads the values of a graph's symbolic sizes from the inputs of a call.

A size is open if it is a symbol of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import sympy
import torch
import torch._dynamo
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from autosplit.capture.size_rule import SizeRule, leaf_text
from autosplit.errors import CaptureError
from autosplit.torch_internals.dynamo import traced_value
from autosplit.torch_internals.pytree import tree_flatten

Value = Callable[["int | torch.SymInt"], int]
"""A graph's size -> its value in one call."""

Within: TypeAlias = "Callable[[int | torch.SymInt], int | torch.SymInt]"
"""A graph's size -> the size in the graph that calls it."""

_READ: Mapping[str, Callable[[Any, int], Any]] = {
    "size": lambda tensor, at: tensor.shape[at],
    "stride": lambda tensor, at: tensor.stride(at),
    "offset": lambda tensor, _: tensor.storage_offset(),
    "value": lambda number, _: number,
}


def leave_open(example: Tensor, dimensions: Iterable[int]) -> None:
    """Mark the sizes of these dimensions of an example input to be symbols in the trace. Sizes 0
    and 1, and sizes on which the forward's Python code branches, become constants nevertheless.
    """
    for dimension in dimensions:
        torch._dynamo.maybe_mark_dynamic(example, dimension)


def is_open(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a size of any of these examples is marked to be a symbol (``leave_open``)."""
    leaves, _ = tree_flatten((args, kwargs))
    return any(hasattr(leaf, "_dynamo_weak_dynamic_indices") for leaf in leaves)


def fake_example(mode: FakeTensorMode, example: Tensor) -> Tensor:
    """A fake tensor in place of an example that the traced forward did not read. Sizes that
    ``leave_open`` has marked are symbols of their own.
    """
    marked = getattr(example, "_dynamo_weak_dynamic_indices", ())
    kinds = [
        DimDynamic.DYNAMIC if dimension in marked else DimDynamic.STATIC
        for dimension in range(example.dim())
    ]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(example, symbolic_context=context)


def sizes_within(sizes: InputSizes | None, leaves: Sequence[Any]) -> Within:
    """Return a function that maps sizes of a called graph to sizes of the calling graph. ``leaves``
    are the fake inputs of the call.

    Raises:
        CaptureError: the call does not satisfy the graph's guards on sizes.
    """
    if sizes is not None:
        return sizes.within(leaves)
    leaf_sizes = [n for leaf in leaves if isinstance(leaf, Tensor) for _, _, n in _sizes(leaf)]
    for size in leaf_sizes:
        if isinstance(size, torch.SymInt):
            int(size)  # specialises it: it is no longer open
    return int


Inputs: TypeAlias = "dict[fx.Node, Any]"
"""Placeholder of a graph -> the tensor or number that it stands for."""


def input_tensors(
    exported: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inputs:
    """The inputs of Dynamo's graph for a call of its module."""
    codegen: Any = exported.graph._codegen
    values = codegen.dynamo_bytecode_flatten(*args, *kwargs.values())
    return dict(zip(exported.graph.find_nodes(op="placeholder"), values, strict=True))


class InputSizes:
    """The places in a call's inputs from which the values of a graph's symbols are read.

    Args:
        env: the shape environment of the graph's symbols.
        traced: position of an input leaf -> its fake value in the graph.
    """

    def __init__(self, env: Any, traced: Mapping[int, Any]) -> None:
        self._env = env
        self._tensors: dict[int, Tensor] = {}
        self._places: dict[sympy.Symbol, tuple[int, str, int]] = {}
        self.add(traced)

    @classmethod
    def of_export(
        cls, exported: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> InputSizes:
        """Input sizes of a graph that was exported with these inputs."""
        leaves, _ = tree_flatten((args, kwargs))
        places = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        traced = {
            places[id(value)]: traced_value(node)
            for node, value in input_tensors(exported, args, kwargs).items()
            if id(value) in places
        }
        return cls(exported.meta["fake_mode"].shape_env, traced)

    def add(self, traced: Mapping[int, Any]) -> None:
        """Add input leaves with their fake values, by position. Leaves that are known are kept."""
        for place, value in traced.items():
            if isinstance(value, Tensor):
                self._tensors.setdefault(place, value)
            for kind, at, size in _symbols(value):
                self._places.setdefault(size, (place, kind, at))

    def __bool__(self) -> bool:
        """Whether any size is a symbol so far. Later tracing may turn symbols into constants."""
        return any(self._env.replace(symbol).free_symbols for symbol in self._places)

    @property
    def dimensions(self) -> dict[int, list[int]]:
        """Position of an input leaf -> its dimensions with open sizes."""
        open_dimensions: dict[int, list[int]] = {}
        for symbol, (leaf, kind, at) in self._places.items():
            if kind == "size" and self._env.replace(symbol).free_symbols:
                open_dimensions.setdefault(leaf, []).append(at)
        return open_dimensions

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols whose values can be read from a call's inputs."""
        return {*self._places}

    @property
    def size_places(self) -> dict[sympy.Symbol, tuple[int, int]]:
        """Symbol -> the input leaf and the dimension whose size it is."""
        return {n: (leaf, at) for n, (leaf, kind, at) in self._places.items() if kind == "size"}

    def size_key(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """A key for a call's inputs: calls with equal keys have equal sizes."""
        return tuple(self._read(leaves).values())

    def value(self, leaves: Sequence[Any]) -> Value:
        """Return a function from sizes of the graph to their values in a call with these inputs.
        The inputs must satisfy the graph's guards.
        """
        values = {symbol: sympy.Integer(int(n)) for symbol, n in self._read(leaves).items()}

        def value(size: int | torch.SymInt) -> int:
            if not isinstance(size, torch.SymInt):
                return size
            expression = self._env.replace(size.node.expr).xreplace(values)
            if expression.free_symbols or size.node.shape_env is not self._env:
                raise CaptureError(f"the size {size} does not follow from the sizes of the inputs")
            return int(expression)

        return value

    def rule(self, leaves: Sequence[Any], outputs: Sequence[Sequence[Any]]) -> SizeRule:
        """The sizes of outputs as expressions of the sizes of inputs.

        Args:
            leaves: the inputs of a call; only those that are no tensors are read.
            outputs: the sizes of each output, as the graph has them.
        """

        def text(size: Any) -> str:
            expression = size.node.expr if isinstance(size, torch.SymInt) else size
            return str(PythonPrinter().doprint(self._env.replace(sympy.sympify(expression))))

        inputs: list[tuple[str, ...] | str | None] = [
            None if isinstance(leaf, Tensor) else leaf_text(leaf) for leaf in leaves
        ]
        for at, traced in self._tensors.items():
            inputs[at] = tuple(map(text, traced.shape))
        places = tuple((str(symbol), *place) for symbol, place in self.size_places.items())
        assumed = assumptions(self._env, self._places)
        names = {name for name, *_ in places}
        conditions = [
            PythonPrinter().doprint(condition)
            for condition in assumed
            # Strides follow from the sizes of inputs without gaps.
            if condition is not sympy.true and {*map(str, condition.free_symbols)} <= names
        ]
        shapes = tuple(tuple(map(text, shape)) for shape in outputs)
        return SizeRule(places, tuple(inputs), tuple(dict.fromkeys(conditions)), shapes)

    def within(self, leaves: Sequence[Any]) -> Within:
        """Return a function from sizes of this graph to sizes of the graph that calls it.

        Guards on sizes that this graph relies on become guards of the calling graph.

        Args:
            leaves: fake leaves of the call.

        Raises:
            CaptureError: the call does not satisfy the guards.
        """
        sizes = self._read(leaves)

        def interpreted(expression: sympy.Basic) -> Any:
            replaced = self._env.replace(expression)
            return sympy_interp(PythonReferenceAnalysis, sizes, replaced)

        def within(size: int | torch.SymInt) -> int | torch.SymInt:
            if not isinstance(size, torch.SymInt):
                return size
            result = interpreted(size.node.expr)
            if not isinstance(result, torch.SymInt):
                return int(result)
            # A trace identifies a size by its node. With the same node, it could confuse the size
            # with another tensor's, for example a gradient's.
            return torch.SymInt(result.node.with_shape_env(result.node.shape_env))

        same = (
            within(size) == _READ[kind](leaves[place], at)
            for place, traced in self._tensors.items()
            for kind, at, size in _sizes(traced)
        )
        ranges = ((symbol, self._env.var_to_range[symbol]) for symbol in sizes)
        bounds = (
            bound for n, interval in ranges for bound in (n >= interval.lower, n <= interval.upper)
        )
        guards = (guard.expr for guard in self._env.guards)
        assumed = map(interpreted, chain(bounds, guards))
        if not all(map(bool, chain(same, assumed))):
            raise CaptureError("the block's graph was captured for other sizes")
        return within

    def _read(self, leaves: Sequence[Any]) -> dict[sympy.Symbol, Any]:
        """Value of each symbol for these inputs."""
        return {n: _READ[kind](leaves[leaf], at) for n, (leaf, kind, at) in self._places.items()}


def assumptions(env: Any, symbols: Iterable[sympy.Symbol]) -> list[sympy.Basic]:
    """The conditions under which a graph is valid: bounds of symbols, and guards."""
    bounds = [
        relation(symbol, bound)
        for symbol in symbols
        for relation, bound in (
            (sympy.Ge, env.var_to_range[symbol].lower),
            (sympy.Le, env.var_to_range[symbol].upper),
        )
        if isinstance(bound, sympy.Integer)  # not infinite
    ]
    return [env.replace(condition) for condition in (*bounds, *(g.expr for g in env.guards))]


def _sizes(traced: Tensor) -> Iterator[tuple[str, int, Any]]:
    """Yield (kind, dimension, value) of each size, each stride and the offset of a tensor."""
    yield from (("size", at, size) for at, size in enumerate(traced.shape))
    yield from (("stride", at, step) for at, step in enumerate(traced.stride()))
    yield "offset", 0, traced.storage_offset()


def _symbols(traced: Any) -> Iterator[tuple[str, int, sympy.Symbol]]:
    """Yield (kind, dimension, symbol) for each size, stride and offset of a tensor that is a single
    symbol; kind is "size", "stride" or "offset". A number has kind "value".
    """
    sizes = _sizes(traced) if isinstance(traced, Tensor) else [("value", 0, traced)]
    for kind, at, size in sizes:
        symbol = size.node.expr if isinstance(size, torch.SymInt) else None
        if isinstance(symbol, sympy.Symbol):
            yield kind, at, symbol
