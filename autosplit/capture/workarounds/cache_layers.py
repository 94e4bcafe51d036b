"""Traced calls that read a configuration once for a model, instead of several times for each layer.

A model of transformers that makes a key-value cache asks its configuration for the kind of each
layer. Every read runs two ``__getattribute__`` of the configuration in Python, which Dynamo traces:
20 of the 48 ms that a layer of a Llama adds to a capture. All layers read the same few attributes,
unless the configuration differs between layers (a *heterogeneous* one, traced as written).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.variables import ConstantVariable, UserFunctionVariable, VariableTracker
from torch._dynamo.variables.builder import SourcelessBuilder

from autosplit.torch_internals.patches import patched

_PLAIN = (int, float, str, bool, type(None))
_ABSENT = object()


@contextlib.contextmanager
def read_layer_configs_once() -> Iterator[None]:
    """Context in which ``get_layer_types_and_kwargs`` of transformers runs outside of the trace.
    Dynamo traces only its reads of attributes, once each, so that guards hold them.
    """
    original: Any = UserFunctionVariable.call_function

    def call_function(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call, unless it is one of ``get_layer_types_and_kwargs``."""
        called = getattr(function, "fn", None)
        if getattr(called, "__name__", "") == "get_layer_types_and_kwargs" and len(args) == 1:
            result = _TracedConfig(tx, args[0].realize()).result_of(called)
            if result is not None:
                variable: VariableTracker = SourcelessBuilder.create(tx, result)
                return variable
        return original(function, tx, args, kwargs)

    with patched(UserFunctionVariable, "call_function", call_function):
        yield


class _TracedConfig:
    """Stand-in for a configuration and for that of each layer, whose attributes are read by
    Dynamo: the forward may have made the configuration, or changed it.
    """

    def __init__(self, tx: Any, config: Any) -> None:
        self._tx, self._config = tx, config
        self._attributes: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "per_layer_config":
            return [self] * self.num_hidden_layers
        if name not in self._attributes:
            is_there = self._traced(hasattr, name)
            self._attributes[name] = self._traced(getattr, name) if is_there else _ABSENT
        if self._attributes[name] is _ABSENT:
            raise AttributeError(name)
        return self._attributes[name]

    def _traced(self, function: Any, name: str) -> Any:
        """The value of ``function(config, name)`` for the traced configuration."""
        arguments = [self._config, ConstantVariable.create(name)]
        builtin = SourcelessBuilder.create(self._tx, function)
        return builtin.call_function(self._tx, arguments, {}).as_python_constant()

    def result_of(self, function: Any) -> Any:
        """The function's result for this stand-in; None if it must be traced instead, because
        layers differ or values are not plain.
        """
        with contextlib.suppress(AttributeError, NotImplementedError):
            if not self.is_heterogeneous:
                result = function(self)
                if _is_plain(result):
                    return result
        return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return _is_plain([*value, *value.values()])
    return type(value) in _PLAIN
