"""The symbolic sizes of a captured forward: their values, and how a part of the graph computes
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from autosplit.capture.input_sizes import InputSizes, assumptions
from autosplit.capture.size_rule import SizeRule

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def holds_size(value: Any) -> bool:
    """Whether a value is a symbolic size, or a tuple of numbers that contains one."""
    numbers = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(number, _SYMBOLIC) for number in numbers)


class ForwardSizes:
    """The sizes of a forward that was captured with open sizes.

    Args:
        env: the shape environment of the symbols.
        inputs: position of an input tensor -> its fake value.
        examples: the input tensors of the capture.
    """

    def __init__(self, env: Any, inputs: Mapping[int, Tensor], examples: Sequence[Tensor]) -> None:
        self._env, self._examples = env, examples
        self._inputs = InputSizes(env, inputs)

    def add_input(self, position: int, value: Tensor) -> None:
        """Add the fake value of an input that the graph returns without reading it."""
        self._inputs.add({position: value})

    @cached_property
    def rule(self) -> SizeRule:
        """The sizes of inputs for which the graph is valid. Read it after everything that may add
        guards on sizes.
        """
        return self._inputs.rule(self._examples, ())

    def output_sizes(
        self, shapes: Sequence[tuple[int, ...]], outputs: Sequence[Sequence[Any]]
    ) -> tuple[tuple[int, ...], ...]:
        """The sizes of outputs, as numbers, for inputs of these shapes, which the graph accepts."""
        return self._inputs.rule(self._examples, outputs).output_sizes(shapes) or ()

    def number(self, size: Any, inputs: Sequence[Tensor] | None = None) -> Any:
        """The value of a size for inputs of certain sizes; None if the size depends on data.

        Args:
            size: a number, or a symbolic one; or a tuple of them.
            inputs: the input tensors; None: those of the capture.
        """
        if isinstance(size, tuple | list):
            return tuple(self.number(number, inputs) for number in size)
        if not isinstance(size, _SYMBOLIC):
            return size
        if not self._follows(size):
            return None
        return self._inputs.value(self._examples if inputs is None else inputs)(size)  # type: ignore[arg-type]

    def concrete(self, value: Tensor) -> Tensor | None:
        """A tensor on the meta device with the sizes and strides that ``value`` has for the inputs
        of the capture; None if its sizes depend on data.
        """
        sizes, strides = (
            [self.number(n) for n in numbers] for numbers in (value.shape, value.stride())
        )
        if None in sizes or None in strides:
            return None
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")

    def is_size(self, value: Any) -> bool:
        """Whether a node's value is a number, or several, that follow from the sizes of inputs."""
        numbers = value if isinstance(value, tuple | list) else [value]
        kinds = (int, float, *_SYMBOLIC)
        return holds_size(value) and all(isinstance(n, kinds) and self._follows(n) for n in numbers)

    def of_arguments(self, arguments: Mapping[int, Tensor]) -> ArgumentSizes:
        """The sizes as a part of the graph reads them from its arguments.

        Args:
            arguments: position of an argument -> its fake value.
        """
        return ArgumentSizes(self._env, arguments)

    def _follows(self, size: Any) -> bool:
        """Whether a size follows from the sizes of the inputs."""
        if not isinstance(size, _SYMBOLIC):
            return True
        symbols: set[Any] = self._env.replace(size.node.expr).free_symbols
        return symbols <= self._inputs.symbols


class ArgumentSizes:
    """The sizes of a forward, as a part of its graph computes them from its own arguments.

    A size of an argument is a symbol, follows from the symbols of all arguments, or becomes a new
    symbol: after pooling, for example, ``s // 2`` if no argument has the size ``s``.

    Args:
        env: the shape environment of the symbols.
        arguments: position of an argument -> its fake value.
    """

    def __init__(self, env: Any, arguments: Mapping[int, Tensor]) -> None:
        self._env = env
        self._shapes = {
            at: [*map(self._expression, value.shape)] for at, value in arguments.items()
        }
        self._places: dict[Any, tuple[int, int]] = {}
        self._symbols: dict[Any, Any] = {}
        sizes = [(n, (at, d)) for at, shape in self._shapes.items() for d, n in enumerate(shape)]
        for size, place in sizes:
            if size.is_Symbol:
                self._places.setdefault(size, place)
        for size, (at, dimension) in sizes:
            if self._is_unknown(size):
                self._symbols[size] = sympy.Symbol(f"size_{at}_{dimension}", integer=True)
                self._places[self._symbols[size]] = (at, dimension)
        self._computed: dict[Any, tuple[fx.Node, int]] = {}
        self._written: dict[Any, Any] = {}

    def rule(self, count: int) -> SizeRule:
        """The sizes of ``count`` arguments for which the part is valid."""
        shapes = (self._shapes.get(at) for at in range(count))
        inputs = [None if shape is None else tuple(map(self._text, shape)) for shape in shapes]
        symbols = [symbol for symbol in self._places if symbol not in self._symbols.values()]
        conditions = [
            self._text(condition)
            for condition in assumptions(self._env, symbols)
            if condition is not sympy.true and not self._is_unknown(condition)
        ]
        places = tuple((str(symbol), *place) for symbol, place in self._places.items())
        return SizeRule(places, tuple(inputs), tuple(dict.fromkeys(conditions)), ())

    def use_computed(self, node: fx.Node, value: Any) -> None:
        """Let sizes that follow from no argument be read from a tensor that the part computes.

        Args:
            node: the node that computes the tensor in the part's graph.
            value: the tensor in the forward's graph.
        """
        shape = value.shape if isinstance(value, Tensor) else ()
        for dimension, size in enumerate(map(self._expression, shape)):
            if self._is_unknown(size):
                symbol = sympy.Symbol(f"size_{node.name}_{dimension}", integer=True)
                self._symbols[size] = symbol
                self._computed[symbol] = (node, dimension)

    def _is_unknown(self, size: Any) -> bool:
        """Whether a size cannot be computed from the sizes that were read so far."""
        symbols = self._resolve(size).free_symbols
        return not symbols <= {*self._places, *self._symbols.values()}

    def write(self, value: Any, arguments: Sequence[fx.Node]) -> Any:
        """Write the nodes that compute a size, or a tuple of sizes, into a graph.

        Args:
            value: the size in the forward's graph.
            arguments: the arguments of the part, in its graph.

        Returns:
            the node, or the number.

        Raises:
            KeyError: the size does not follow from the sizes of the arguments.
        """
        if isinstance(value, tuple | list):
            return tuple(self.write(number, arguments) for number in value)
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = self._resolve(self._expression(value))
        if expression not in self._written:
            if self._is_unknown(expression):
                raise KeyError(str(value))
            symbols = {}
            for symbol in sorted(expression.free_symbols, key=str):
                if symbol in self._computed:
                    node, dimension = self._computed[symbol]
                else:
                    at, dimension = self._places[symbol]
                    node = arguments[at]
                symbols[symbol] = fx.Proxy(node).size(dimension)
            result = sympy_interp(PythonReferenceAnalysis, symbols, expression)
            self._written[expression] = result.node if isinstance(result, fx.Proxy) else result
        return self._written[expression]

    def _expression(self, size: Any) -> Any:
        """The size as an expression of symbols."""
        symbolic = isinstance(size, _SYMBOLIC)
        return self._env.replace(size.node.expr if symbolic else sympy.sympify(size))

    def _resolve(self, expression: Any) -> Any:
        """An expression with the arguments' own symbols in place of their sizes."""
        return expression.xreplace(self._symbols)

    def _text(self, expression: Any) -> str:
        return str(PythonPrinter().doprint(self._resolve(expression)))
