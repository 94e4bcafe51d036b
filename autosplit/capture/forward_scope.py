"""``ForwardScope``: variables of a module's forward in a call, as Dynamo's guards name them."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn
from torch._dynamo.convert_frame import get_traced_fn

from .argument_binding import Binding


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
