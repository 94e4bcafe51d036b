"""Puts a finished save in the place of a checkpoint, in one step of the file system.

A save has its files in a folder of its own, ``save-NUMBER``, in which they get their place and are
never renamed. What names them is the checkpoint's ``.metadata``, and renaming that one file takes
back the old checkpoint and gives the new one. Where there was no folder yet, it is made beside its
place and renamed when it is whole. So whoever reads, whenever a save was killed, finds the old
checkpoint or the new one; the next save removes what was left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from autosplit.errors import CheckpointError

from .folder import METADATA, SAVE, digest, manifest_text, parts_in_use


class Staging:
    """Where one save has its files until they are the checkpoint; rank 0 makes and ends it.

    Args:
        path: of the checkpoint.
        number: of the save, the same on all ranks, which no other save has.
        fresh: whether there is no folder at ``path`` yet.

    Attributes:
        folder: where the ranks write.
    """

    def __init__(self, path: Path, number: str, *, fresh: bool) -> None:
        self._path = path
        self._beside = path.absolute().parent / f".{path.name}.saving"
        self._root = self._beside if fresh else path
        self.folder = self._root / f"{SAVE}{number}"
        self._committed = False

    def prepare(self) -> None:
        """Remove what killed saves have left, and make the folder.

        Raises:
            CheckpointError: something else than a folder is at the path.
        """
        if self._path.exists() and not self._path.is_dir():
            raise CheckpointError(f"{self._path} is a file: give the path of a folder to save to")
        shutil.rmtree(self._beside, ignore_errors=True)
        # If that cannot be read, nobody knows what it needs; it is replaced all the same.
        with contextlib.suppress(CheckpointError, OSError):
            there = (self._path / METADATA).exists()
            _clear(self._path, parts_in_use(self._path) if there else set())
        self.folder.mkdir(parents=True)

    def commit(self, digests: Mapping[str, str]) -> None:
        """Make what was written the checkpoint, and remove the one before.

        Args:
            digests: of the files that all ranks have written, by name in the folder.

        Raises:
            CheckpointError: this rank does not see them.
        """
        name = self.folder.name
        absent = [file for file in digests if not (self.folder / file).is_file()]
        if absent:
            raise CheckpointError(
                f"other ranks have written {', '.join(absent)} to {self.folder}, which are not "
                "there: all ranks must see the same folder"
            )
        found = {f"{name}/{file}": value for file, value in digests.items()}
        found[METADATA] = digest(self.folder / METADATA)
        with (self.folder / "manifest.json").open("w") as file:
            file.write(manifest_text(found))
            file.flush()
            os.fsync(file.fileno())
        _sync(self.folder)
        (self.folder / METADATA).replace(self._root / METADATA)
        self._committed = self._root == self._path
        _sync(self._root)
        if not self._committed:
            self._root.rename(self._path)
            self._committed = True
            _sync(self._path.absolute().parent)
        _clear(self._path, {name})

    def abandon(self) -> None:
        """Remove what was written, after a save that failed before it was the checkpoint."""
        if not self._committed:
            shutil.rmtree(self.folder if self._root == self._path else self._root, True)


def _clear(path: Path, used: set[str]) -> None:
    """Remove the files of saves but those in use, and of torch's own saves likewise."""
    for found in [*path.glob(f"{SAVE}*"), *path.glob("__*_*.distcp"), *path.glob(".metadata.tmp")]:
        if found.name in used:
            continue
        if found.is_dir():
            shutil.rmtree(found, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                found.unlink()


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    if os.name != "posix":
        return  # where a folder cannot be opened
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
