"""Options that several commands share."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import click

from autosplit.errors import AutosplitError, OutputError
from autosplit.text.figures import parse_size
from autosplit.text.files import check_file, check_folder


def typed_errors(
    command: Callable[..., None], told: type[click.ClickException] = click.ClickException
) -> Callable[..., None]:
    """Print an autosplit error as a message and exit with the status of ``told``; anything else is
    a bug and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AutosplitError as error:
            raise told(f"{type(error).__name__}: {_words(error)}") from error

    return run


def _words(error: AutosplitError) -> str:
    """What it says, without the traceback of a rank that raised an error of autosplit itself."""
    text = str(error)
    if isinstance(error.__cause__, AutosplitError):
        text = text.partition("\nTraceback (most recent call last)")[0]
    return text


backend = click.option(
    "--backend",
    default="eager",
    show_default=True,
    help="How graphs are run: eager, inductor.",
)


def _overrides(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    wrong = [name for name, sign, _ in pairs if not (name and sign)]
    if wrong:
        raise click.BadParameter(f"expected NAME=VALUE, got {wrong[0]!r}")
    return {name: value for name, _, value in pairs}


def names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Of an option that may be left out; then there are none."""
    if value is None:
        return ()
    found = tuple(part.strip() for part in value.split(",") if part.strip())
    if not found:
        raise click.BadParameter(f"expected one or more names with commas, got {value!r}")
    return found


def counts(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"expected counts such as 2,4, got {value!r}") from error
    if min(counts) < 1:
        raise click.BadParameter(f"expected counts of at least 1, got {value!r}")
    return counts


def dimensions(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[tuple[str, int], ...]:
    """Names and sizes of a mesh; without any, none."""
    pairs = [part.strip().partition("=") for part in (value or "").split(",") if part.strip()]
    try:
        found = tuple((name.strip(), int(size)) for name, _, size in pairs)
    except ValueError as error:
        raise click.BadParameter(f"expected NAME=SIZE,... such as pp=2, got {value!r}") from error
    if len({name for name, _ in found}) < len(found) or any(size < 1 for _, size in found):
        raise click.BadParameter(f"expected each dimension once, of 1 or more ranks, got {value!r}")
    return found


def _memory(context: click.Context, parameter: click.Parameter, value: str) -> str | int:
    """The name of a setting, or a number of bytes."""
    try:
        return parse_size(value, "bytes") if value[:1].isdecimal() else value
    except AutosplitError as error:
        raise click.BadParameter(str(error)) from error


memory_option = click.option(
    "--memory",
    default="balanced",
    show_default=True,
    callback=_memory,
    help="fast, balanced, lean, or what a microbatch may hold between I and W, such as 10MiB.",
)


def numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"expected numbers such as 2,1.5, got {value!r}") from error


setting = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_overrides,
    help="Keyword setting for the factory; may be repeated.",
)


def _writable(check: Callable[[pathlib.Path], None]) -> Callable[..., pathlib.Path | None]:
    def callback(
        context: click.Context, parameter: click.Parameter, value: pathlib.Path | None
    ) -> pathlib.Path | None:
        """Refused before anything is measured that would then be lost."""
        if value is not None:
            try:
                check(value)
            except OutputError as error:
                raise click.BadParameter(str(error)) from error
        return value

    return callback


def file_to_write(*names: str, **more: Any) -> Callable[[Any], Any]:
    """An option for a file that the command writes."""
    kind = click.Path(path_type=pathlib.Path, dir_okay=False)
    return click.option(*names, type=kind, callback=_writable(check_file), **more)


def folder_to_write(*names: str, **more: Any) -> Callable[[Any], Any]:
    """An option for a folder that the command writes into."""
    kind = click.Path(path_type=pathlib.Path, file_okay=False)
    return click.option(*names, type=kind, callback=_writable(check_folder), **more)


json_option = file_to_write("--json", "json_file", help="Write the rows to this file.")


def tell_written(files: Sequence[pathlib.Path]) -> None:
    """Say which files were written, and what is missing for a picture that is not among them."""
    click.echo("\nwritten: " + ", ".join(map(str, files)))
    if "timeline.png" not in {file.name for file in files}:
        click.echo("no timeline.png, which needs matplotlib: pip install autosplit[plot]")
