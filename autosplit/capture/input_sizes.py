"""``InputSizes``: sizes that a graph leaves open, known from the inputs of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch._dynamo
from torch import Tensor, fx

from autosplit.errors import CaptureError
from autosplit.torch_internals.pytree import tree_flatten

Value = Callable[["int | torch.SymInt"], int]
"""What a size is in one call."""

_READ: Mapping[str, Callable[[Tensor, int], Any]] = {
    "size": lambda tensor, at: tensor.shape[at],
    "stride": lambda tensor, at: tensor.stride(at),
    "offset": lambda tensor, _: tensor.storage_offset(),
}


def leave_open(example: Tensor, dimensions: Iterable[int]) -> None:
    """Have these sizes of an example input be symbols when it is traced, where tracing can: sizes
    0 and 1 never are, nor those that the forward's Python decides by.
    """
    for dimension in dimensions:
        torch._dynamo.maybe_mark_dynamic(example, dimension)


def is_open(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a size of any of these examples was left open."""
    leaves, _ = tree_flatten((args, kwargs))
    return any(hasattr(leaf, "_dynamo_weak_dynamic_indices") for leaf in leaves)


class InputSizes:
    """Where in a call's inputs each symbol of a graph is found.

    Args:
        exported: Dynamo's graph.
        args: the positional inputs that it was traced with.
        kwargs: the keyword inputs.
    """

    def __init__(
        self, exported: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        leaves, _ = tree_flatten((args, kwargs))
        places = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        codegen: Any = exported.graph._codegen
        given = codegen.dynamo_bytecode_flatten(*args, *kwargs.values())
        self._env = exported.meta["fake_mode"].shape_env
        self._found: dict[sympy.Symbol, tuple[int, str, int]] = {}
        self._traced: dict[sympy.Symbol, int] = {}
        holes = exported.graph.find_nodes(op="placeholder")
        for node, value in zip(holes, given, strict=True):
            traced = node.meta.get("val", node.meta.get("example_value"))
            if isinstance(traced, Tensor) and id(value) in places:
                for kind, at, size in _symbols(traced):
                    self._found.setdefault(size, (places[id(value)], kind, at))
                    self._traced.setdefault(size, int(_READ[kind](value, at)))

    def __bool__(self) -> bool:
        """Whether any size is open, by what is known now: tracing on may settle some."""
        return any(self._env.replace(symbol).free_symbols for symbol in self._found)

    @property
    def dimensions(self) -> dict[int, list[int]]:
        """Place of an input leaf -> its dimensions whose sizes are open."""
        found: dict[int, list[int]] = {}
        for symbol, (leaf, kind, at) in self._found.items():
            if kind == "size" and self._env.replace(symbol).free_symbols:
                found.setdefault(leaf, []).append(at)
        return found

    def value(self, leaves: Sequence[Any]) -> Value:
        """What any size of the graph is in the call with these inputs, which it fits."""
        values = {
            symbol: sympy.Integer(int(_READ[kind](leaves[leaf], at)))
            for symbol, (leaf, kind, at) in self._found.items()
        }

        def value(size: int | torch.SymInt) -> int:
            if not isinstance(size, torch.SymInt):
                return size
            expression = self._env.replace(size.node.expr).xreplace(values)
            if expression.free_symbols:
                raise CaptureError(f"the size {size} does not follow from the sizes of the inputs")
            return int(expression)

        return value

    def larger(self, leaves: Sequence[Any]) -> bool:
        """Whether a size in this call is larger than in the one that was traced."""
        return any(
            _READ[kind](leaves[leaf], at) > self._traced[symbol]
            for symbol, (leaf, kind, at) in self._found.items()
        )


def _symbols(traced: Tensor) -> Iterator[tuple[str, int, sympy.Symbol]]:
    """Sizes, strides and the offset of a traced input that are symbols by themselves."""
    sizes: list[tuple[str, int, Any]] = [("size", at, n) for at, n in enumerate(traced.shape)]
    sizes += [("stride", at, step) for at, step in enumerate(traced.stride())]
    sizes.append(("offset", 0, traced.storage_offset()))
    for kind, at, size in sizes:
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            yield kind, at, size.node.expr
