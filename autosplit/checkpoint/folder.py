"""Folders of torch.distributed.checkpoint, read without running anything that they name.

A save of ours has a manifest of what files it wrote, with their digests: SHA-256, since processors
have instructions for it; of the digests in Python's standard library it is the fastest there.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import CheckpointError

from .files import (
    IndexedFiles,
    Reader,
    check_archive,
    check_dense,
    kind_of,
    load_plain,
    open_file,
    reading,
)
from .metadata import Chunk, Stored, parse_metadata

METADATA = ".metadata"
SAVE = "save-"
"""What the folder's name begins with in which a save has its files."""
_FORM = 1
_INDEX = "*.index.json"
_RUN, _OPTIMIZER = "autosplit.", "optimizer."


def open_checkpoint(path: str | Path) -> Reader:
    """A reader for whatever is at ``path``.

    Nothing in it is run, whoever wrote it: only tensors and plain values are read.

    Args:
        path: a file of ``torch.save``, with a state dict or a dict with one under "model" or
            "state_dict"; a ``.safetensors`` file; a folder with such a file, or with several and
            an index as transformers writes them; or a folder of torch.distributed.checkpoint,
            with a state dict or one under "model".

    Raises:
        CheckpointError: there is none, or of another kind.
    """
    path = Path(path)
    with reading(path):
        if path.is_dir():
            return DistributedFolder(path) if (path / METADATA).exists() else _of_folder(path)
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint at {path}")
        return open_file(path)


def _of_folder(path: Path) -> Reader:
    found = sorted(path.glob(_INDEX)) or sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        listed = ", ".join(sorted(file.name for file in path.iterdir())[:10])
        unfinished = any(path.glob(f"{SAVE}*"))
        raise CheckpointError(
            f"expected in {path} the .metadata of torch.distributed.checkpoint, one {_INDEX} or "
            f"one .safetensors file; there is {listed or 'nothing'}: "
            + ("a save that did not get to its end" if unfinished else "give the path of one file")
        )
    return IndexedFiles(found[0]) if found[0].suffix == ".json" else open_file(found[0])


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, for ``load_state_dict`` of a model that is not cut.

    Raises:
        CheckpointError: as for ``open_checkpoint``, or it is damaged.
    """
    reader = open_checkpoint(path)
    reader.verify(reader.shapes)
    return reader.read(reader.shapes)


class DistributedFolder:
    """A folder of torch.distributed.checkpoint; every process reads what it wants by itself.

    What ``save_checkpoint`` wrote has a manifest and is compared with it; what others wrote, with
    the checksums that ``torch.save`` gives each entry.

    Attributes:
        entries: all that it has, by key.
        optimizer: what it has of an optimizer, flattened as ``get_optimizer_state_dict`` with
            ``flatten_optimizer_state_dict`` does.
        run: what it has of the run: its step, random generators and so on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = path / METADATA
        try:
            contents = parse_metadata(metadata.read_bytes() if metadata.is_file() else b"")
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"cannot read {metadata}: {error}") from error
        self.entries = contents.entries
        self._check_lengths()
        self._manifest = self._find_manifest()
        self.optimizer, self.run = (Part(self, prefix) for prefix in (_OPTIMIZER, _RUN))
        others = () if contents.wrapped else (_OPTIMIZER, _RUN)
        self._model = Part(self, "model." if contents.wrapped else "", others)
        tensors = {
            name: (entry.shape, entry.dtype)
            for name, entry in self._model.entries.items()
            if entry.shape is not None and entry.dtype is not None
        }
        self.shapes = {name: shape for name, (shape, _) in tensors.items()}
        self.kinds = {name: kind_of(dtype) for name, (_, dtype) in tensors.items()}

    def verify(self, names: Iterable[str]) -> None:
        """Raises CheckpointError: what ``names`` of the model are read from is damaged."""
        self._model.verify(names)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return self._model.read(names)

    def verify_share(self, share: int, shares: int) -> None:
        """As ``verify``, of one of ``shares`` parts of all files that a manifest has."""
        if self._manifest is not None:
            self._manifest.verify(sorted(self._manifest.digests)[share::shares])

    def verify_entry(self, key: str, entry: Stored) -> None:
        """As ``verify``, of one entry."""
        if self._manifest is not None:
            self._manifest.verify([METADATA, *(chunk.file for chunk in entry.chunks)])
            return
        for chunk in entry.chunks:
            check_archive(io.BytesIO(self._bytes(chunk)), f"{key} in {self.path / chunk.file}")
            self._loaded(key, entry, chunk)

    def value(self, key: str, entry: Stored) -> Any:
        """The tensor or plain value of an entry."""
        parts = [(chunk, self._loaded(key, entry, chunk)) for chunk in entry.chunks]
        if entry.shape is None or (len(parts) == 1 and parts[0][1].shape == entry.shape):
            return parts[0][1]
        whole = torch.zeros(entry.shape, dtype=entry.dtype, device="cpu")
        for chunk, part in parts:
            pairs = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(at, at + size) for at, size in pairs)] = part
        return whole

    def _check_lengths(self) -> None:
        """Refuse a folder that cannot have all that its metadata names."""
        ends: dict[str, int] = {}
        for entry in self.entries.values():
            for chunk in entry.chunks:
                ends[chunk.file] = max(chunk.start + chunk.length, ends.get(chunk.file, 0))
        for file, end in ends.items():
            path = self.path / file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            if path.stat().st_size < end:
                raise CheckpointError(
                    f"{path} is cut off: expected {end} bytes, there are {path.stat().st_size}"
                )

    def _find_manifest(self) -> Manifest | None:
        """The manifest of the save that wrote this; None if ``save_checkpoint`` did not."""
        files = {chunk.file for entry in self.entries.values() for chunk in entry.chunks}
        saves = {file.partition("/")[0] for file in files if file.startswith(SAVE)}
        if not saves:
            return None
        manifest = Manifest(self.path, self.path / min(saves) / "manifest.json")
        if unknown := sorted({*files, METADATA} - manifest.digests.keys()):
            raise CheckpointError(
                f"{self.path} is damaged: {', '.join(unknown)} not of the save that wrote the rest"
            )
        manifest.verify([METADATA])
        return manifest

    def _loaded(self, key: str, entry: Stored, chunk: Chunk) -> Any:
        what = f"{key} in {self.path / chunk.file}"
        value = load_plain(self._bytes(chunk), what)
        if entry.shape is None:
            return value
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{what} is a {type(value).__name__} and no tensor")
        check_dense(value, what)
        if value.shape != chunk.sizes or value.dtype != entry.dtype:
            raise CheckpointError(
                f"{what} is damaged: expected {entry.dtype} {list(chunk.sizes)}, came "
                f"{value.dtype} {list(value.shape)}"
            )
        return value

    def _bytes(self, chunk: Chunk) -> bytes:
        path = self.path / chunk.file
        with reading(path), path.open("rb") as file:
            file.seek(chunk.start)
            return file.read(chunk.length)


class Part:
    """What a folder has of the model, the optimizer or the run.

    Args:
        folder: the folder.
        prefix: of the keys.
        others: the prefixes that others have.

    Attributes:
        entries: by name, without the prefix.
    """

    def __init__(
        self, folder: DistributedFolder, prefix: str, others: tuple[str, ...] = ()
    ) -> None:
        self._folder = folder
        self._prefix = prefix
        self.entries = {
            key.removeprefix(prefix): entry
            for key, entry in folder.entries.items()
            if key.startswith(prefix) and not key.startswith(others)
        }

    def verify(self, names: Iterable[str]) -> None:
        """Raises CheckpointError: what ``names`` are read from is damaged."""
        for name in names:
            self._folder.verify_entry(self._prefix + name, self.entries[name])

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """What is there under ``names``."""
        return {n: self._folder.value(self._prefix + n, self.entries[n]) for n in names}


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_text(digests: Mapping[str, str]) -> str:
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
        """Compare files with their digests, each once; all are in the manifest.

        Raises:
            CheckpointError: one is missing or damaged.
        """
        for name in files:
            if name in self._verified:
                continue
            path = self._folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            with reading(path):
                found = digest(path)
            if found != self.digests[name]:
                raise CheckpointError(
                    f"{path} is damaged: it is not what was written (its SHA-256 is another)"
                )
            self._verified.add(name)


def parts_in_use(path: Path) -> set[str]:
    """The first parts of the names of all files that the checkpoint at ``path`` has.

    Raises:
        CheckpointError: its metadata cannot be read.
    """
    contents = parse_metadata((path / METADATA).read_bytes())
    entries = contents.entries.values()
    return {chunk.file.partition("/")[0] for entry in entries for chunk in entry.chunks}
