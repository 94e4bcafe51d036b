"""Files: read up to a bound, and checked before the work that fills them, with typed errors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autosplit.errors import AutosplitError, OutputError

LARGEST = 1 << 25
"""Bytes: several times what the largest schedule or plan that is accepted takes."""


def read_text(path: str | Path, kind: str, error: type[AutosplitError]) -> str:
    """The text of a file, line ends as they are.

    Args:
        path: the file; devices and pipes are read up to the bound.
        kind: what it should hold, for messages, as in ``"a plan"``.
        error: what to raise.

    Raises:
        AutosplitError: of that type, if there is no such file, it cannot be read, is no UTF-8
            text, or has more than ``LARGEST`` bytes.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise error(
                f"cannot read {kind} from {str(path)!r}: it has more than {LARGEST:,} bytes, which "
                "none has"
            )
        return content.decode("utf-8-sig")  # some editors put a mark in front
    except UnicodeDecodeError as problem:
        raise error(
            f"cannot read {kind} from {str(path)!r}: it is no UTF-8 text ({problem.reason} at byte "
            f"{problem.start})"
        ) from problem
    except (OSError, ValueError) as problem:  # a path may hold what no path can, such as "\0"
        raise error(f"cannot read {kind} from {str(path)!r}: {problem}") from problem


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of writing a file or a folder into ``OutputError``.

    Raises:
        OutputError: it cannot be written; says why.
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
        OutputError: it cannot be written.
    """
    with writing(path):
        Path(path).write_text(text, encoding="utf-8")


def check_file(path: str | os.PathLike[str]) -> None:
    """Refuse a file that could not be written, before what it is to hold is computed. Nothing is
    left behind, and a file that is there stays as it is.

    Raises:
        OutputError: says what is in the way.
    """
    path = Path(path)
    with writing(path):
        if path.exists():
            with path.open("ab"):
                return
        if not path.parent.is_dir():
            raise OutputError(f"there is no folder {path.parent} to write {path.name} into")
        _check_place(path.parent)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Refuse a folder that could not be made or written into; as ``check_file``.

    Raises:
        OutputError: says what is in the way.
    """
    path = Path(path)
    with writing(path):
        there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        if not there.is_dir():
            raise OutputError(f"cannot write into a folder {path}: {there} is a file")
        _check_place(there)


def _check_place(folder: Path) -> None:
    """Only an attempt tells: permissions are nothing to root, nor on a read-only disk."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
