"""A user's function named as `MODULE:FACTORY`: found, called, and its failures told as its own."""

from __future__ import annotations

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

from .factory_settings import parameter_kinds, read_setting


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
    int, float, bool or str, one of several values, or None where that may be. A parameter without
    annotation goes by its default; without either, and under another annotation, a Python literal
    becomes its value and anything else stays a text.

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
    kinds = parameter_kinds(factory, signature)
    read = {
        name: read_setting(name, value, kinds.get(name, kinds.get("**")))
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
