"""Read files up to a size limit, and check output files before long work, with typed errors."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autosplit.errors import AutosplitError, OutputError

LARGEST = 1 << 25
"""Most bytes of a file; the largest accepted schedule or plan takes a fraction of it."""


def read_text(path: str | Path, kind: str, error: type[AutosplitError]) -> str:
    """The text of a file, with its line ends.

    Args:
        path: the file; devices and pipes are read up to the size limit.
        kind: the expected content for error texts, such as ``"a plan"``.
        error: the type of error to raise.

    Raises:
        AutosplitError: of the type ``error``: the file does not exist, cannot be read, is not UTF-8
            text, or has more than ``LARGEST`` bytes.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise error(
                f"cannot read {kind} from {str(path)!r}: it has more than {LARGEST:,} bytes, the "
                "limit"
            )
        return content.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as problem:
        raise error(
            f"cannot read {kind} from {str(path)!r}: it is not UTF-8 text ({problem.reason} at "
            f"byte {problem.start})"
        ) from problem
    except (OSError, ValueError) as problem:  # ValueError: a path with a null character
        raise error(f"cannot read {kind} from {str(path)!r}: {problem}") from problem


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context that turns errors of writing a file or a folder into ``OutputError``.

    Raises:
        OutputError: the file or folder cannot be written; the text says why.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        if isinstance(error, OSError) or "null" in str(error):
            raise OutputError(f"cannot write {os.fspath(path)!r}: {_reason(error)}") from error
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file of UTF-8 text.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing(path):
        Path(path).write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], data: object) -> None:
    """Write data as JSON into a file.

    Raises:
        OutputError: the file cannot be written.
    """
    write_text(path, json.dumps(data, indent=2) + "\n")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    if os.name != "posix":
        return  # Windows cannot open a folder
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def check_file(path: str | os.PathLike[str]) -> None:
    """Refuse a file that cannot be written. Call it before the content is computed. The check
    leaves no new file, and does not change an existing file.

    Raises:
        OutputError: says why it cannot be written.
    """
    path = Path(path)
    with writing(path):
        if path.exists():
            with path.open("ab"):
                return
        if not path.parent.is_dir():
            raise OutputError(
                f"there is no folder {path.parent} to write {path.name} into: create it"
            )
        _check_place(path.parent)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Refuse a folder that cannot be created or written into, as ``check_file`` does.

    Raises:
        OutputError: says why the folder cannot be used.
    """
    path = Path(path)
    with writing(path):
        existing = next(
            folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
        )
        if not existing.is_dir():
            raise OutputError(
                f"cannot write into a folder {path}, because {existing} is a file: name another"
            )
        _check_place(existing)


def _check_place(folder: Path) -> None:
    """Try to write a file in a folder. A look at its permissions would not be enough for root, or
    on a read-only disk.
    """
    with tempfile.TemporaryFile(dir=folder):
        pass


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
