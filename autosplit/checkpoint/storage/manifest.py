"""What files a save wrote, with their digests.

SHA-256, since processors have instructions for it: of the digests in Python's standard library it
is the fastest there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from autosplit.errors import CheckpointError

NAME = "manifest.json"
METADATA = ".metadata"
_FORM = 1


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dumps(digests: Mapping[str, str]) -> str:
    """A manifest as text.

    Args:
        digests: by the file's name from the folder of the checkpoint, ``.metadata`` among them.
    """
    return json.dumps({"form": _FORM, "sha256": dict(digests)}, indent=1)


class Manifest:
    """The digests of a checkpoint, and which of its files were found to have them.

    Args:
        folder: of the checkpoint.
        path: of the manifest.

    Raises:
        CheckpointError: it cannot be read.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder = folder
        self._verified: set[str] = set()
        try:
            found = json.loads(path.read_text())
            form, digests = found["form"], found["sha256"]
            self.digests = {str(name): str(value) for name, value in digests.items()}
        except Exception as error:  # JSON can be wrong in any way
            raise CheckpointError(
                f"cannot read {path}, and without it nobody knows whether {folder} is whole: "
                f"{type(error).__name__}: {error}"
            ) from error
        if form != _FORM:
            raise CheckpointError(
                f"{path} has the form {form!r}, this version of autosplit reads {_FORM}: load it "
                "with the version that wrote it"
            )

    def verify(self, files: Iterable[str]) -> None:
        """Compare files with their digests, each once.

        Raises:
            CheckpointError: one is missing or damaged, or was not written by this save.
        """
        for name in files:
            if name in self._verified:
                continue
            path = self._folder / name
            if name not in self.digests:
                raise CheckpointError(f"{path} is not of the save that wrote {self._folder}")
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            try:
                found = digest(path)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error}") from error
            if found != self.digests[name]:
                raise CheckpointError(
                    f"{path} is damaged: it is not what was written (its SHA-256 is another)"
                )
            self._verified.add(name)
