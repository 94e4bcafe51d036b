"""``ForwardScope``: variables of a module's forward in a call, as Dynamo's guards name them.

Binding of a call's arguments to the parameters of a function.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from torch import nn
from torch._dynamo.convert_frame import get_traced_fn

_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_PLAIN = {inspect.Parameter.POSITIONAL_OR_KEYWORD, _KEYWORD_ONLY}


class Binding:
    """``inspect.Signature.bind`` with defaults applied, without its cost (ten microseconds a
    call) for functions that take no ``*args``, no ``**kwargs`` and nothing by position only.
    """

    def __init__(self, function: FunctionType) -> None:
        self._signature = inspect.signature(function, follow_wrapped=False)
        parameters = self._signature.parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        self._is_plain = set(kinds.values()) <= _PLAIN
        self._names = parameters.keys()
        self._positional = [n for n, kind in kinds.items() if kind is not _KEYWORD_ONLY]
        self._defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Every parameter's value; None where the function cannot be called like this."""
        if not self._is_plain or len(args) > len(self._positional):
            return self._slowly(args, kwargs)
        given = dict(zip(self._positional, args, strict=False))
        given.update(kwargs)
        bound = self._defaults | given
        twice = len(given) < len(args) + len(kwargs)
        return None if twice or bound.keys() != self._names else bound

    def _slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        return bound.arguments


class ForwardScope:
    """Variables of the function that Dynamo traces for a module: its parameters, what it closes
    over, and its globals.

    Attributes:
        function: that is traced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.function: FunctionType = get_traced_fn(module)[0]
        self._binding = Binding(self.function)

    @property
    def is_current(self) -> bool:
        """Whether Dynamo would trace this function now."""
        return get_traced_fn(self._module)[0] is self.function

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Variables of one call; None where this is no call of the function."""
        function, root = get_traced_fn(self._module)
        if function is not self.function:
            return None
        bound = self._binding(args if root is None else (root, *args), kwargs)
        if bound is None:
            return None
        if function.__closure__:
            cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
            bound.update({name: cell.cell_contents for name, cell in cells})
        return {"L": bound, "G": function.__globals__, "___from_numpy": _same}


def _same(array: Any) -> Any:
    """An array is in the graph as a tensor over its memory."""
    return array
