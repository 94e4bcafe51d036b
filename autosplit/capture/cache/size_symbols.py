"""``SizeSymbols``: the sizes that a graph leaves open, and what is assumed of them.

Dynamo gives a size that is left open a symbol, and its environment of shapes notes what holds of
symbols: ranges, equalities, and guards, by which tracing has decided. A graph that is kept is valid
where all of this holds. What Dynamo assumed is in the graph's key; what AOTAutograd and the passes
assumed after it is kept with the graph, and a process that finds the graph assumes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import sympy
import torch.fx.experimental._config
from torch import SymBool, SymFloat, SymInt
from torch._dynamo.source import CallMethodItemSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.value_ranges import ValueRanges

from .argument_text import NoFingerprintError
from .size_expressions import Form, read_expression, write_expression

NUMBERS: dict[str, tuple[type, Any]] = {
    "int": (int, SymInt),
    "float": (float, SymFloat),
    "bool": (bool, SymBool),
}
"""Kinds of numbers that follow from sizes."""
_ANY = ValueRanges.unknown_int()
_UNUSUAL = (
    "deferred_runtime_asserts",
    "exclusion_constraints",
    "size_like",
    "specializations",
    "unbacked_inputs",
    "unbacked_renamings",
    "var_to_hint_override",
)
"""What an environment has where sizes are more than those of inputs, or users told of them."""


class Assumptions(NamedTuple):
    """What tracing and passes assumed of open sizes after Dynamo.

    Attributes:
        guards: that they added, in order.
        state: ranges and equalities that follow from all guards, as text.
    """

    guards: tuple[Form, ...]
    state: str


class SizeSymbols:
    """The symbols of one environment of shapes, as they are when Dynamo has captured a graph.

    Args:
        mode: of the values in the graph.
        order: by which they are numbered; None for that of where the forward finds them.

    Attributes:
        values: those of the example.
        order: the symbols by their numbers.

    Raises:
        NoFingerprintError: another process could not tell what is assumed of them.
    """

    def __init__(self, mode: FakeTensorMode, order: Sequence[sympy.Symbol] | None = None) -> None:
        self._env: Any = mode.shape_env
        self.values: dict[sympy.Symbol, sympy.Integer] = {}
        if self._env is not None and self._env.var_to_range:
            read = _merely_read(self._env)
            self.values = {size: n for size, n in _values(self._env).items() if size not in read}
        named = {symbol: _sources(self._env, symbol) for symbol in self.values}
        self.order = tuple(sorted(named, key=named.__getitem__) if order is None else order)
        self._numbers = {symbol: at for at, symbol in enumerate(self.order)}
        self._names = tuple(named[symbol] for symbol in self.order)
        self._known = len(self._env.guards) if self else 0

    def __bool__(self) -> bool:
        """Whether any size was left open."""
        return bool(self.values)

    def lines(self, *, exact: bool = False) -> Iterator[str]:
        """Lines of the key of a graph over these sizes.

        Args:
            exact: whether it is for the sizes of its example only.
        """
        if not self:
            return
        config: Any = torch.fx.experimental._config
        yield f"sizes {self._env.settings} {config.get_hash().hex()}"
        for at, symbol in enumerate(self.order):
            kind = symbol.is_integer, symbol.is_positive, symbol.is_nonnegative
            yield f"size {at}: {self._names[at]} {kind} {self.values[symbol] if exact else ''}"
        yield f"{self._state()} {self._guards()}"

    def text(self, number: Any) -> str:
        """Text of a size: a number, or how it follows from those that are open."""
        return repr(self.write(number)) if isinstance(number, SymInt) else repr(number)

    def write(self, number: SymInt | SymFloat | SymBool) -> tuple[str, Form]:
        """Kind of a number, and how it follows from the sizes.

        Raises:
            NoFingerprintError: it does not.
        """
        node: Any = number.node
        if node.shape_env is not self._env:
            raise NoFingerprintError("a size is of another environment")
        return node.pytype.__name__, write_expression(node.expr, self._numbers)

    def read(self, kind: str, form: Form) -> Any:
        """The number of ``write``.

        Raises:
            NoFingerprintError: it is none.
        """
        if kind not in NUMBERS:
            raise NoFingerprintError(f"a number is a {kind}")
        plain, symbolic = NUMBERS[kind]
        expression = read_expression(form, self.order)
        return symbolic(SymNode(expression, self._env, plain, None))

    def write_size(self, size: Any) -> int | tuple[str, Form]:
        """An integer as it is, another number as by ``write``."""
        return size if type(size) is int else self.write(size)

    def sizes(self, written: Iterable[Any]) -> list[Any]:
        """The sizes of ``write_size``."""
        return [size if type(size) is int else self.read(*size) for size in written]

    def leaves_any(self, number: Any) -> bool:
        """Whether a number is the value of a tensor of which nothing is assumed."""
        return isinstance(number, SymInt) and number.node.expr in _merely_read(self._env)

    def assumed(self, *, everything: bool = False) -> Assumptions:
        """What was assumed since Dynamo captured the graph, or at all.

        Raises:
            NoFingerprintError: that has no form on disk.
        """
        return Assumptions(self._guards(0 if everything else self._known), self._state())

    def satisfy(self, assumptions: Assumptions) -> bool:
        """Whether assumptions of another process hold for the sizes of this one's example; nothing
        is assumed by asking.
        """
        guards = (read_expression(form, self.order) for form in assumptions.guards)
        return all(guard.xreplace(self.values) is sympy.true for guard in guards)

    def assume(self, assumptions: Assumptions) -> bool:
        """Assume what another process did, so that the guards of this one's capture check it;
        whether sizes are now as they were there. A guard that follows from others is not added.
        """
        for form in assumptions.guards:
            guard = read_expression(form, self.order)
            if self._env.evaluate_expr(guard) is not sympy.true:
                return False
        return self._state() == assumptions.state

    def _guards(self, since: int = 0) -> tuple[Form, ...]:
        """Guards in the order in which they were added, each once."""
        added = self._env.guards[since:]
        if any(guard.size_oblivious for guard in added):
            raise NoFingerprintError("sizes were compared as if they were never 0 or 1")
        return tuple(dict.fromkeys(write_expression(each.expr, self._numbers) for each in added))

    def _state(self) -> str:
        """Ranges of sizes, what they were found to be equal to, and divisible by."""
        env, numbers = self._env, self._numbers
        _refuse_unusual(env)
        held = [
            (at, str(env.var_to_range[symbol]), self._replaced(symbol))
            for at, symbol in enumerate(self.order)
        ]
        divisible = sorted(repr(write_expression(each, numbers)) for each in env.divisible)
        return repr((held, divisible))

    def _replaced(self, symbol: sympy.Symbol) -> Form | None:
        if symbol not in self._env.replacements:
            return None
        return write_expression(self._env.replacements[symbol], self._numbers)


def _sources(env: Any, symbol: sympy.Symbol) -> tuple[str, ...]:
    """Where the forward finds a size."""
    found = tuple(str(source.name) for source in env.var_to_sources.get(symbol, ()))
    if not found:
        raise NoFingerprintError(f"{symbol} is the size of no input")
    return found


def _values(env: Any) -> dict[sympy.Symbol, sympy.Integer]:
    """The sizes of the example.

    Raises:
        NoFingerprintError: there are other symbols than sizes of inputs.
    """
    # Until torch 2.12 they had another name.
    values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    if values.keys() != env.var_to_range.keys():
        raise NoFingerprintError("sizes depend on data")
    _refuse_unusual(env)
    if not all(isinstance(value, sympy.Integer) for value in values.values()):
        raise NoFingerprintError("numbers besides sizes are left open")
    return dict(values)


def _merely_read(env: Any) -> set[sympy.Symbol]:
    """Symbols of tensors of one integer of which nothing is assumed: those in which batch
    normalisation counts batches.
    """
    assumed = [guard.expr for guard in env.guards]
    assumed += [*env.divisible, *env.replacements, *env.replacements.values()]
    known = {symbol for each in assumed for symbol in each.free_symbols}
    free = {symbol for symbol, bounds in env.var_to_range.items() if bounds == _ANY} - known
    return {each for each in free if isinstance(env.var_to_sources[each][0], CallMethodItemSource)}


def _refuse_unusual(env: Any) -> None:
    found = [name for name in _UNUSUAL if getattr(env, name, None)]
    if found:
        raise NoFingerprintError(f"sizes depend on data, or are constrained ({found[0]})")
