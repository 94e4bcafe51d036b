"""A folder of files by key, private to the user."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pathlib
import stat
import tempfile

try:
    import fcntl
except ModuleNotFoundError:  # Windows: what a killed writer left stays
    fcntl = None  # type: ignore[assignment]

_DIGEST = hashlib.sha256().digest_size
_PREFIX = ".writing-"

log = logging.getLogger(__name__)


class FileStore:
    """A lossy store: entries that cannot be read, or are damaged, count as absent.

    Several processes may read and write one folder: a file appears whole or not at all. What a
    writer that was killed left unfinished the next one removes.

    Args:
        folder: is made, for its owner only, when it is first written to. One that is somebody
            else's, or that others may write to, is not used.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def read(self, key: str) -> bytes | None:
        """The bytes under a key; None where there are none, or they are damaged."""
        try:
            if not self._is_own():
                return None
            content = (self._folder / key).read_bytes()
        except OSError:
            return None
        digest, data = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(data).digest() != digest:
            log.warning("%s is damaged; it is made again", self._folder / key)
            return None
        return data

    def write(self, key: str, data: bytes) -> bool:
        """Store bytes; whether that was done. A folder that cannot be written to (a full disk)
        stores nothing.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_own():
                return False
            self._clean()
            content = hashlib.sha256(data).digest() + data
            try:
                self._replace(key, content)
            except FileNotFoundError:  # cleaned away by another writer before it was held
                self._replace(key, content)
        except OSError as error:
            log.warning("nothing can be kept in %s: %s", self._folder, error)
            return False
        return True

    def _replace(self, key: str, content: bytes) -> None:
        """Write beside the file, then put it in its place."""
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=_PREFIX)
        try:
            with os.fdopen(handle, "wb") as file:
                _hold(handle)
                file.write(content)
                file.flush()
                if fcntl is not None:  # still held, so that nobody takes it for left behind
                    os.replace(name, self._folder / key)
            if fcntl is None:
                os.replace(name, self._folder / key)
        except OSError:
            pathlib.Path(name).unlink(missing_ok=True)
            raise

    def _clean(self) -> None:
        """Remove temporary files of dead writers: a lock ends with its process."""
        if fcntl is None:
            return
        for path in self._folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    def _is_own(self) -> bool:
        """Whether the folder is the user's and writable by nobody else, in a folder of the user's
        or the system's.
        """
        found, above = os.lstat(self._folder), os.stat(self._folder.parent)
        if not hasattr(os, "geteuid"):  # Windows: folders below the user's are the user's
            return stat.S_ISDIR(found.st_mode)
        me, shared = os.geteuid(), found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        is_mine = stat.S_ISDIR(found.st_mode) and found.st_uid == me and above.st_uid in {me, 0}
        if is_mine and not shared:
            return True
        log.warning(
            "%s is not used: it must be a folder that belongs to you and that nobody else may "
            "write to (chmod 700)",
            self._folder,
        )
        return False


def _hold(handle: int) -> None:
    """Say that a process writes into this file, for as long as it has it open."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks: nothing is cleaned there
            fcntl.flock(handle, fcntl.LOCK_EX)
