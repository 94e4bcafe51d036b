"""Code that several commands share: parameter types, options, and error messages."""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import click

from autosplit.backends.backend import BACKENDS
from autosplit.errors import (
    AutosplitError,
    CaptureError,
    DeadlockError,
    FactoryError,
    PipelineError,
    SplitError,
)
from autosplit.planner.cuts import CapError
from autosplit.runtime.options import SplitOptions
from autosplit.text.figures import parse_size
from autosplit.text.files import check_file, check_folder

VERDICTS = (CapError, CaptureError, SplitError, DeadlockError, PipelineError)
"""Errors that answer a command's question: the model or schedule cannot be split, fit or run."""


class _WrongCommandError(click.ClickException):
    exit_code = 2


def typed_errors(
    command: Callable[..., None], verdicts: tuple[type[AutosplitError], ...] = VERDICTS
) -> Callable[..., None]:
    """Decorator that prints an autosplit error as a message. The exit status is 1 for errors in
    ``verdicts``, and 2 for other autosplit errors. Any other exception is a bug and keeps its
    traceback.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AutosplitError as error:
            is_verdict = isinstance(error, verdicts) and not isinstance(error, FactoryError)
            shown = click.ClickException if is_verdict else _WrongCommandError
            raise shown(f"{type(error).__name__}: {_words(error)}") from error

    return run


def _words(error: AutosplitError) -> str:
    """The error's text, without the traceback of a rank that raised an autosplit error."""
    text = str(error)
    if isinstance(error.__cause__, AutosplitError):
        text = text.partition("\nTraceback (most recent call last)")[0]
    return text


class Read(click.ParamType):  # type: ignore[type-arg]
    """Parameter type of a command whose values a function reads from text.

    Args:
        name: the name of the values in help texts.
        read: a function that parses the text; it raises an ``AutosplitError`` or a ``ValueError``
            if the text is invalid.
    """

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._read(value) if isinstance(value, str) else value
        except (AutosplitError, ValueError) as error:
            self.fail(str(error), param, ctx)


class Listed(click.ParamType):  # type: ignore[type-arg]
    """Parameter type of a command: one or more values with commas between them."""

    def __init__(self, element: click.ParamType[Any]) -> None:
        self.name, self._element = f"{element.name},...", element

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts:
            self.fail(f"expected one or more values with commas, got {value!r}", param, ctx)
        return tuple(self._element.convert(part, param, ctx) for part in parts)


COUNTS = Listed(click.IntRange(min=1))
NAMES = Listed(click.STRING)
NUMBERS = Listed(click.FloatRange(min=0.0))


class Assigned(click.ParamType):  # type: ignore[type-arg]
    """Parameter type of a command: ``NAME=VALUE``, as a pair."""

    name = "NAME=VALUE"

    def __init__(self, element: click.ParamType[Any]) -> None:
        self._element = element

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, sign, text = map(str.strip, value.partition("="))
        if not (name and sign):
            self.fail(f"expected NAME=VALUE, got {value!r}", param, ctx)
        return name, self._element.convert(text, param, ctx)


def _literal(text: str) -> object:
    """The value of a Python literal, in which true and false may be in lower case. Other text is
    returned unchanged.
    """
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


class _Written(click.Path):
    """Parameter type of a command: a file or folder to write. A path that cannot be written is
    refused before anything is computed.
    """

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        path: Any = super().convert(value, param, ctx)
        try:
            (check_file if self.file_okay else check_folder)(path)
        except AutosplitError as error:
            self.fail(str(error), param, ctx)
        return path


FILE = _Written(path_type=pathlib.Path, dir_okay=False)
FOLDER = _Written(path_type=pathlib.Path, file_okay=False)
SIZE = Read("SIZE", lambda text: parse_size(text, "bytes"))

backend = click.option(
    "--backend",
    default="eager",
    show_default=True,
    type=click.Choice([*BACKENDS]),
    help="How graphs are run.",
)


def _memory(text: str) -> str | int:
    """Parse a memory setting of ``split``; raises a ``SplitError`` for other text."""
    memory = parse_size(text, "bytes") if text[:1].isdecimal() else text
    return SplitOptions(memory=memory).memory


memory_option = click.option(
    "--memory",
    default="balanced",
    show_default=True,
    type=Read("MEMORY", _memory),
    help="fast, balanced, lean, or what a microbatch may hold between I and W, such as 10MiB.",
)
setting = click.option(
    "--set",
    "overrides",
    multiple=True,
    type=Assigned(Read("VALUE", _literal)),
    callback=lambda context, parameter, pairs: dict(pairs),
    help="Keyword setting for the factory, a Python literal or text; may be repeated.",
)
json_option = click.option("--json", "json_file", type=FILE, help="Write the rows to this file.")


def tell_written(files: Sequence[pathlib.Path]) -> None:
    """Print which files were written, and what must be installed if a picture is missing."""
    click.echo("\nwritten: " + ", ".join(map(str, files)))
    if "timeline.png" not in {file.name for file in files}:
        click.echo("no timeline.png, which needs matplotlib: pip install autosplit[plot]")
