"""Settings of a factory, from the text of a command line to what its parameters take."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from autosplit.errors import PipelineError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Settings = TypeVar("Settings", bound=DataclassInstance)

_PLAIN = (bool, int, float, str)


def configure(kind: type[Settings], overrides: Mapping[str, object]) -> Settings:
    """A dataclass `kind` of settings with some of its fields overridden.

    Values may be the text of a command line (`"256"`, `"true"`) or of the field's own type.
    Fields are int, float, bool or str.

    Raises:
        PipelineError: an unknown name (the known ones are listed) or a value that does not
            fit its field.
    """
    known = {field.name: field.type for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for name in overrides:
        if name not in known:
            raise PipelineError(
                f"unknown setting {name!r} of {kind.__name__}; known: {', '.join(known)}"
            )
    return kind(**{name: _convert(name, value, hints[name]) for name, value in overrides.items()})


def parameter_kinds(factory: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """What each parameter takes, that of `**settings` under `"**"`; none where nothing says."""
    function = inspect.getattr_static(factory, "__init__") if isinstance(factory, type) else factory
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # names of the user's that are only there for a type checker
        every = {name: each.annotation for name, each in signature.parameters.items()}
        hints = {n: a for n, a in every.items() if a is not signature.empty and type(a) is not str}
    found = {}
    for name, parameter in signature.parameters.items():
        key = "**" if parameter.kind is parameter.VAR_KEYWORD else name
        if name in hints:
            found[key] = hints[name]
        elif type(parameter.default) in _PLAIN:
            found[key] = type(parameter.default)
    return found


def read_setting(name: str, text: str, kind: Any) -> object:
    """The value that a text stands for."""
    if kind in _PLAIN:
        return _convert(name, text, kind)
    if kind is object:  # left to the factory, as `configure` takes it
        return text
    if typing.get_origin(kind) is typing.Literal:
        known = {str(value): value for value in typing.get_args(kind)}
        if text not in known:
            raise PipelineError(f"setting {name} is one of {', '.join(known)}, got {text!r}")
        return known[text]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _read_one_of(name, text, typing.get_args(kind))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _read_one_of(name: str, text: str, kinds: Sequence[Any]) -> object:
    if type(None) in kinds and text.lower() == "none":
        return None
    errors = []
    for kind in sorted(kinds, key=lambda each: each is str):  # a text fits always
        if kind is not type(None):
            try:
                return read_setting(name, text, kind)
            except PipelineError as error:
                errors.append(str(error))
    raise PipelineError("; or ".join(errors))


def _convert(name: str, value: object, kind: type) -> object:
    truths = {"true": True, "1": True, "false": False, "0": False}
    try:
        if isinstance(value, str):
            return truths[value.lower()] if kind is bool else kind(value)
        if kind is float and type(value) is int:
            return float(value)
    except (KeyError, ValueError):
        pass
    # type() and not isinstance(): True is an int, but `dim=True` is a mistake.
    if type(value) is kind:
        return value
    expected = "true or false" if kind is bool else kind.__name__
    raise PipelineError(f"setting {name} expects {expected}, got {value!r}")
