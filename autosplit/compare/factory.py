"""A user's function named as `MODULE:FACTORY`: found, called with settings from a command line, and
its failures told as its own.

A factory takes keyword settings (`--set dim=256`) and returns `(model, args)`, see
`autosplit.compare.example`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from autosplit.errors import AutosplitError, PipelineError

_PLAIN = (bool, int, float, str)


def _kinds(factory: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """What each parameter is annotated as, or its default is; that of `**settings` under `"**"`."""
    function = inspect.getattr_static(factory, "__init__") if isinstance(factory, type) else factory
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # names of the user's that are only there for a type checker
        hints = {}
    return {
        "**" if each.kind is each.VAR_KEYWORD else name: hints.get(name, type(each.default))
        for name, each in signature.parameters.items()
    }


def _read(name: str, text: str, kind: Any) -> object:
    """The value that a text stands for."""
    if kind in _PLAIN:
        return convert(name, text, kind)
    if kind is object:  # left to the factory
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def convert(name: str, value: object, kind: type) -> object:
    """The value of a setting that is an int, float, bool or str, or the text of one.

    Raises:
        PipelineError: it is something else.
    """
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


def load_factory(spec: str) -> Callable[..., Any]:
    """The factory that `spec`, a text like "examples.models:llama", names.

    The working directory comes first on `sys.path` from here on, as under `python -m`, so
    that a model's file needs no installation and its own late imports work too.

    Raises:
        PipelineError: `spec` has no colon; the module is not there, or raises while it is
            imported; it has no such attribute, or that is not callable.
    """
    module_name, _, attribute = spec.partition(":")
    if not (module_name and attribute):
        raise PipelineError(
            f"expected MODULE:FACTORY, for example examples.models:llama, got {spec!r}"
        )
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    module = _import(module_name)
    missing = object()
    factory = getattr(module, attribute, missing)
    if factory is missing:
        raise PipelineError(
            f"{module_name} has no {attribute!r}; functions there: "
            f"{', '.join(_functions(module)) or 'none'}"
        )
    if not callable(factory):
        raise PipelineError(
            f"{spec} is not callable but of type {type(factory).__name__}; functions there: "
            f"{', '.join(_functions(module)) or 'none'}"
        )
    return typing.cast(Callable[..., Any], factory)


def prepared(spec: str, overrides: Mapping[str, object]) -> Callable[[], Any]:
    """The factory `spec` with these settings, yet to be called.

    A setting that is a text, as from a command line, becomes what its parameter is annotated as: an
    int, float, bool or str. A parameter without annotation goes by its default; without either, and
    under another annotation, a Python literal becomes its value and anything else stays a text.

    Raises:
        PipelineError: as `load_factory`, or the factory does not take the settings; and when it is
            called, what the factory raises.
    """
    factory = load_factory(spec)
    signature = inspect.signature(factory)
    try:
        signature.bind(**overrides)
    except TypeError as error:
        raise PipelineError(
            f"{spec}{signature} cannot be called with {_listed(overrides)}: {error}"
        ) from None
    kinds = _kinds(factory, signature)
    read = {
        name: _read(name, value, kinds.get(name, kinds.get("**")))
        if isinstance(value, str)
        else value
        for name, value in overrides.items()
    }
    return _Prepared(spec, factory, read)


@dataclass(frozen=True)
class _Prepared:
    """A factory with its settings; what it raises names it."""

    spec: str
    factory: Callable[..., Any]
    overrides: Mapping[str, object]

    def __call__(self) -> Any:
        with failures_of(self.spec):
            return self.factory(**self.overrides)


@contextlib.contextmanager
def failures_of(what: str) -> Iterator[None]:
    """Around a user's own code: an error of it says whose it is, and where.

    Args:
        what: is called, for messages.

    Raises:
        PipelineError: in place of any error that is not autosplit's own.
    """
    try:
        yield
    except AutosplitError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise PipelineError(
            f"{what} raised {type(error).__name__}: {error} ({_where(error)})"
        ) from error


def _listed(overrides: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in overrides.items()) or "no settings"


def _import(name: str) -> ModuleType:
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        dotted = ".".join(Path(name).with_suffix("").parts).strip(".")
        raise PipelineError(
            f"expected the dotted name of a module, got {name!r}; did you mean {dotted!r}?"
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if _is_or_contains(error.name, name):
            raise PipelineError(
                f"no module named {error.name!r}; {name!r} was looked for in the working "
                f"directory {os.getcwd()} and among the installed packages"
            ) from error
        raise _broken_module(name, error) from error
    except Exception as error:  # a user's module may raise anything
        raise _broken_module(name, error) from error


def _is_or_contains(found: str | None, name: str) -> bool:
    """Whether module `found` is `name` itself or one of the packages around it."""
    return found is not None and f"{name}.".startswith(f"{found}.")


def _broken_module(name: str, error: Exception) -> PipelineError:
    return PipelineError(
        f"module {name!r} was found but raised {type(error).__name__} while it was imported: "
        f"{error} ({_where(error)})"
    )


def _where(error: Exception) -> str:
    """The user's line: the last one that is not in torch."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/torch/" not in Path(frame.filename).as_posix()]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _functions(module: ModuleType) -> list[str]:
    """Public functions that `module` defines itself; its classes are layers and settings."""
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and not isinstance(value, type)
        and getattr(value, "__module__", None) == module.__name__
    )
