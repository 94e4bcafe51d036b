"""Traced calls that read a configuration once for a model, instead of several times for each layer.

A model of transformers that makes a key-value cache asks its configuration for the kind of each
layer. Every read runs two ``__getattribute__`` of the configuration in Python, which Dynamo traces:
20 of the 48 ms that a layer of a Llama adds to a capture. All layers read the same few attributes,
unless the configuration differs between layers (a *heterogeneous* one, traced as written).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any, cast

from torch._dynamo.variables import UserFunctionVariable, VariableTracker
from torch._dynamo.variables.builder import SourcelessBuilder

from autosplit.torch_internals.patches import patched

_PLAIN = (int, float, str, bool, type(None))


@contextlib.contextmanager
def read_layer_configs_once() -> Iterator[None]:
    """Context in which Dynamo computes ``get_layer_types_and_kwargs`` of transformers outside of
    the trace. The traced code compares the attributes that the function reads, so that guards
    hold them.
    """
    original: Any = UserFunctionVariable.call_function

    def call_function(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call. ``get_layer_types_and_kwargs`` is called instead, and the attributes that
        it reads are compared in the trace."""
        called = getattr(function, "fn", None)
        if getattr(called, "__name__", "") == "get_layer_types_and_kwargs" and len(args) == 1:
            config = args[0].realize()
            reads = _ConfigReads(getattr(config, "value", None))
            result = reads.result_of(called)
            if result is not None:
                attributes = SourcelessBuilder.create(tx, (*reads.attributes.items(),))
                compare = UserFunctionVariable(cast(FunctionType, _require_attributes))
                original(compare, tx, [config, attributes], {})
                variable: VariableTracker = SourcelessBuilder.create(tx, result)
                return variable
        return original(function, tx, args, kwargs)

    with patched(UserFunctionVariable, "call_function", call_function):
        yield


class _ConfigReads:
    """Stand-in for a model's configuration, and for each layer's; it records which attributes are
    read.

    Attributes:
        attributes: values by name of the attributes that were read; None for an absent attribute.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self.attributes: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "per_layer_config":
            return [self] * self.num_hidden_layers
        self.attributes[name] = getattr(self._config, name, None)
        return getattr(self._config, name)

    def result_of(self, function: Any) -> Any:
        """The function's result for this stand-in; None if it must be traced instead, because
        layers differ or values are not plain.
        """
        if getattr(self._config, "is_heterogeneous", True):
            return None
        result = function(self)
        return result if _is_plain(result) and _is_plain([*self.attributes.values()]) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return _is_plain([*value, *value.values()])
    return type(value) in _PLAIN


def _require_attributes(config: Any, attributes: tuple[tuple[str, Any], ...]) -> None:
    """Read each attribute. Dynamo traces this function, so that the capture gets a guard for
    each."""
    if hasattr(config, "_heterogeneity_spec"):
        raise RuntimeError("the configuration has become heterogeneous during its capture")
    for name, value in attributes:
        if getattr(config, name, None) != value:
            raise RuntimeError(f"{name} of the configuration has changed during its capture")
