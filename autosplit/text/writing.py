"""Output files and folders, checked before the work that fills them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autosplit.errors import OutputError


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
