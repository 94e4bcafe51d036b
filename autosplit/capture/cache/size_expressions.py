"""Expressions over sizes that are symbols as plain data, and back.

torch writes such expressions as Python, and evaluates that where it reads them. Here they are
trees of names from a list, in which a symbol is a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import sympy
from torch.utils._sympy import functions

from .argument_text import NoFingerprintError

Form: TypeAlias = "int | tuple[Any, ...]"
"""An integer, ``("float", digits)``, ``("symbol", number)``, or a name and arguments."""

_NAMES = (
    "BitwiseFn_bitwise_and",
    "BitwiseFn_bitwise_or",
    "BitwiseFn_bitwise_xor",
    "CeilDiv",
    "CeilToInt",
    "CleanDiv",
    "FloatPow",
    "FloatTrueDiv",
    "FloorDiv",
    "FloorToInt",
    "Identity",
    "IntTrueDiv",
    "Max",
    "Min",
    "Mod",
    "ModularIndexing",
    "OpaqueUnaryFn_sqrt",
    "PowByNatural",
    "PythonMod",
    "ToFloat",
    "TruncToInt",
    "Where",
)
_SYMPYS = (
    sympy.Add,
    sympy.Mul,
    sympy.Pow,
    sympy.Eq,
    sympy.Ne,
    sympy.Lt,
    sympy.Le,
    sympy.Gt,
    sympy.Ge,
    sympy.And,
    sympy.Or,
    sympy.Not,
)
_KNOWN: dict[str, Any] = {
    **{kind.__name__: kind for kind in _SYMPYS},
    **{name: getattr(functions, name) for name in _NAMES if hasattr(functions, name)},
}
_UNORDERED = frozenset({"Add", "Mul", "And", "Or", "Max", "Min"})


def write_expression(expression: Any, numbers: Mapping[sympy.Symbol, int]) -> Form:
    """The expression as plain data, equal for equal expressions.

    Args:
        expression: over sizes.
        numbers: of its symbols.

    Raises:
        NoFingerprintError: it has no such form.
    """
    form = _write(expression, numbers)
    if read_expression(form, tuple(numbers)) != expression:
        raise NoFingerprintError(f"a size is {expression}, which would be read as something else")
    return form


def read_expression(form: Form, symbols: Sequence[sympy.Symbol]) -> Any:
    """The expression of ``write_expression``.

    Args:
        form: of the expression.
        symbols: by their numbers.

    Raises:
        NoFingerprintError: it holds something that is not listed.
    """
    if type(form) is int:
        return sympy.Integer(form)
    if type(form) is not tuple or not form:
        raise NoFingerprintError(f"{form!r} is no expression")
    name, *arguments = form
    if name == "symbol":
        return symbols[arguments[0]]
    if name == "float":
        return sympy.Float(float.fromhex(arguments[0]))
    if name not in _KNOWN:
        raise NoFingerprintError(f"sizes with {name} are not read")
    return _KNOWN[name](*(read_expression(each, symbols) for each in arguments))


def _write(expression: Any, numbers: Mapping[sympy.Symbol, int]) -> Form:
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Float):
        return "float", float(expression).hex()
    if isinstance(expression, sympy.Symbol):
        if expression not in numbers:
            raise NoFingerprintError(f"{expression} follows from no size of an input")
        return "symbol", numbers[expression]
    name = type(expression).__name__
    if _KNOWN.get(name) is not type(expression):
        raise NoFingerprintError(f"sizes with {name} ({expression}) have no form on disk")
    # In which order sympy has operands depends on how symbols are called.
    arguments = [_write(each, numbers) for each in expression.args]
    return name, *(sorted(arguments, key=repr) if name in _UNORDERED else arguments)
