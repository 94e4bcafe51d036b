"""The symbolic sizes of a captured forward: their values, and how a part of the graph computes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from autosplit.capture.input_sizes import InputSizes
from autosplit.capture.size_rule import SizeRule

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


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
            size: a number, or a symbolic one.
            inputs: the input tensors; None: those of the capture.
        """
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
        is_symbolic = any(isinstance(number, _SYMBOLIC) for number in numbers)
        return is_symbolic and all(isinstance(n, kinds) and self._follows(n) for n in numbers)

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
    """The sizes of a forward as a part of its graph computes them from its own arguments.

    Args:
        env: the shape environment of the symbols.
        arguments: position of an argument -> its fake value.
    """

    def __init__(self, env: Any, arguments: Mapping[int, Tensor]) -> None:
        self._env = env
        self._sizes = InputSizes(env, arguments)
        self._written: dict[Any, Any] = {}

    def rule(self, count: int) -> SizeRule:
        """The sizes of ``count`` arguments for which the part is valid."""
        return self._sizes.rule([None] * count, ())

    def write(self, value: Any, read: Callable[[int, int], fx.Proxy]) -> Any:
        """Write the nodes that compute a size, or a tuple of sizes, into a graph.

        Args:
            value: the size in the forward's graph.
            read: a function from an argument and a dimension to a node with this size.

        Returns:
            the node, or the number.

        Raises:
            KeyError: the size does not follow from the sizes of the arguments.
        """
        if isinstance(value, tuple | list):
            return tuple(self.write(number, read) for number in value)
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = self._env.replace(value.node.expr)
        if expression not in self._written:
            symbols = {
                symbol: read(*place)
                for symbol, place in self._sizes.size_places.items()
                if symbol in expression.free_symbols
            }
            if len(symbols) < len(expression.free_symbols):
                raise KeyError(str(expression))
            result = sympy_interp(PythonReferenceAnalysis, symbols, expression)
            self._written[expression] = result.node if isinstance(result, fx.Proxy) else result
        return self._written[expression]
