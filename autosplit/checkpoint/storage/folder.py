"""Folders of torch.distributed.checkpoint, read without running anything that they name."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import CheckpointError

from .manifest import METADATA, NAME, Manifest
from .metadata import Chunk, Stored, parse_metadata
from .single_file import check_archive, check_dense, kind_of, load_plain

SAVE = "save-"
"""What the folder's name begins with in which a save has its files."""
_RUN = "autosplit."
_OPTIMIZER = "optimizer."


class DistributedFolder:
    """A folder of torch.distributed.checkpoint; every process reads what it wants by itself.

    What ``save_checkpoint`` wrote has a manifest and is compared with it; what others wrote, with
    the checksums that ``torch.save`` gives each entry.

    Attributes:
        optimizer: names of what it has of an optimizer, flattened as ``get_optimizer_state_dict``
            with ``flatten_optimizer_state_dict`` does.
        run: names of what it has of the run: its step, random generators and so on.
        identity: of its metadata.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = path / METADATA
        try:
            content = metadata.read_bytes() if metadata.is_file() else b""
            contents = parse_metadata(content)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"cannot read {metadata}: {error}") from error
        self.identity = hashlib.sha256(content).hexdigest()
        self._entries = contents.entries
        self._prefix = "model." if contents.wrapped else ""
        self._check_lengths()
        self._manifest = self._find_manifest()
        tensors = {
            key.removeprefix(self._prefix): entry
            for key, entry in self._entries.items()
            if entry.shape is not None and key.startswith(self._prefix)
            if contents.wrapped or not key.startswith((_OPTIMIZER, _RUN))
        }
        self.shapes = {name: entry.shape or torch.Size() for name, entry in tensors.items()}
        self.kinds = {n: kind_of(e.dtype) for n, e in tensors.items() if e.dtype is not None}
        self.optimizer = self._under(_OPTIMIZER)
        self.run = self._under(_RUN)

    def _under(self, prefix: str) -> list[str]:
        return [key.removeprefix(prefix) for key in self._entries if key.startswith(prefix)]

    def verify(self, names: Iterable[str]) -> None:
        """Raises CheckpointError: what ``names`` of the model are read from is damaged."""
        self._verify(self._prefix + name for name in names)

    def verify_optimizer(self, names: Iterable[str]) -> None:
        """Likewise, of names in ``optimizer``."""
        self._verify(_OPTIMIZER + name for name in names)

    def verify_share(self, share: int, shares: int) -> None:
        """Likewise, of one of ``shares`` parts of all files that a manifest has."""
        if self._manifest is not None:
            self._manifest.verify(sorted(self._manifest.digests)[share::shares])

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return self._read(self._prefix, names)

    def read_optimizer(self, names: Iterable[str]) -> dict[str, Any]:
        """What ``optimizer`` has under ``names``."""
        return self._read(_OPTIMIZER, names)

    def read_run(self) -> dict[str, Any]:
        """All that ``run`` names, verified."""
        self._verify(_RUN + name for name in self.run)
        return self._read(_RUN, self.run)

    def _verify(self, keys: Iterable[str]) -> None:
        chunks = [(key, chunk) for key in keys for chunk in self._entries[key].chunks]
        if self._manifest is not None:
            self._manifest.verify(dict.fromkeys((METADATA, *(chunk.file for _, chunk in chunks))))
            return
        for key, chunk in chunks:
            check_archive(io.BytesIO(self._bytes(chunk)), f"{key} in {self.path / chunk.file}")
            self._loaded(key, self._entries[key], chunk)

    def _check_lengths(self) -> None:
        """Refuse a folder that cannot have all that its metadata names."""
        ends: dict[str, int] = {}
        for entry in self._entries.values():
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
        files = {chunk.file for entry in self._entries.values() for chunk in entry.chunks}
        saves = {file.partition("/")[0] for file in files if file.startswith(SAVE)}
        if not saves:
            return None
        manifest = Manifest(self.path, self.path / min(saves) / NAME)
        if unknown := sorted({*files, METADATA} - manifest.digests.keys()):
            raise CheckpointError(
                f"{self.path} is damaged: {', '.join(unknown)} not of the save that wrote the rest"
            )
        manifest.verify([METADATA])
        return manifest

    def _read(self, prefix: str, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._value(prefix + name) for name in names}

    def _value(self, key: str) -> Any:
        entry = self._entries[key]
        parts = [(chunk, self._loaded(key, entry, chunk)) for chunk in entry.chunks]
        if entry.shape is None or (len(parts) == 1 and parts[0][1].shape == entry.shape):
            return parts[0][1]
        whole = torch.zeros(entry.shape, dtype=entry.dtype)
        for chunk, part in parts:
            place = tuple(
                slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            whole[place] = part
        return whole

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
        try:
            with path.open("rb") as file:
                file.seek(chunk.start)
                return file.read(chunk.length)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error


def folders_in_use(path: Path) -> Mapping[str, None]:
    """The first parts of the names of all files that the checkpoint at ``path`` has.

    Raises:
        CheckpointError: its metadata cannot be read.
    """
    contents = parse_metadata((path / METADATA).read_bytes())
    chunks = (chunk for entry in contents.entries.values() for chunk in entry.chunks)
    return dict.fromkeys(chunk.file.partition("/")[0] for chunk in chunks)
