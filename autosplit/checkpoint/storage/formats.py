"""Checkpoints of whole models on disk, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from torch import Tensor

from autosplit.errors import CheckpointError

from .folder import SAVE, DistributedFolder
from .manifest import METADATA
from .single_file import SafetensorsFile, StateDictFile

_INDEX = "*.index.json"


class Reader(Protocol):
    """A checkpoint of a whole model. Opening and reading one runs nothing that it contains."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Of its tensors, by name."""
        ...

    @property
    def kinds(self) -> Mapping[str, str]:
        """Of its tensors, by name, see ``files.kind_of``."""
        ...

    @property
    def identity(self) -> str:
        """Tells it from others, without its tensors being read."""
        ...

    def verify(self, names: Iterable[str]) -> None:
        """Find out whether what the tensors ``names`` are read from is as it was written.

        Raises:
            CheckpointError: it is missing or damaged, as far as its form shows that.
        """
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors ``names``, on the CPU."""
        ...


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
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _open(path: Path) -> Reader:
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint at {path}")
        return _of_file(path)
    if (path / METADATA).exists():
        return DistributedFolder(path)
    found = sorted(path.glob(_INDEX)) or sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        listed = ", ".join(sorted(file.name for file in path.iterdir())[:10])
        unfinished = any(path.glob(f"{SAVE}*"))
        raise CheckpointError(
            f"expected in {path} the .metadata of torch.distributed.checkpoint, one {_INDEX} or "
            f"one .safetensors file; there is {listed or 'nothing'}: "
            + ("a save that did not get to its end" if unfinished else "give the path of one file")
        )
    return IndexedFiles(found[0]) if found[0].suffix == ".json" else SafetensorsFile(found[0])


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, for ``load_state_dict`` of a model that is not cut.

    Raises:
        CheckpointError: as for ``open_checkpoint``, or it is damaged.
    """
    reader = open_checkpoint(path)
    reader.verify(reader.shapes)
    return reader.read(reader.shapes)


class IndexedFiles:
    """Several files and an index that says in which of them each tensor is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _weight_map(path)
        for file in sorted(set(self._files.values())):
            inside = PurePosixPath(file.replace("\\", "/"))
            if inside.is_absolute() or ".." in inside.parts or ":" in file:
                raise CheckpointError(f"{path} leads out of its folder, to {file}")
        self._readers = {f: _of_file(path.parent / f) for f in sorted(set(self._files.values()))}
        absent = [n for n, file in self._files.items() if n not in self._readers[file].shapes]
        if absent:
            listed = "; ".join(f"{name} in {self._files[name]}" for name in absent)
            raise CheckpointError(f"{path} promises what is not there: {listed}")
        self.shapes = {name: self._readers[file].shapes[name] for name, file in self._files.items()}
        self.kinds = {name: self._readers[file].kinds[name] for name, file in self._files.items()}

    @property
    def identity(self) -> str:
        return ", ".join(f"{file} {reader.identity}" for file, reader in self._readers.items())

    def verify(self, names: Iterable[str]) -> None:
        for file, wanted in self._by_file(names).items():
            self._readers[file].verify(wanted)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        names = list(names)
        found: dict[str, Tensor] = {}
        for file, wanted in self._by_file(names).items():
            found |= self._readers[file].read(wanted)
        return {name: found[name] for name in names}

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self._files[name], []).append(name)
        return found


def _of_file(path: Path) -> Reader:
    return SafetensorsFile(path) if path.suffix == ".safetensors" else StateDictFile(path)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found: Any = json.loads(path.read_text())["weight_map"]
        if not all(isinstance(file, str) for file in found.values()):
            raise TypeError("files are named by strings")
        return dict(found)
    except Exception as error:  # JSON can be wrong in any way
        raise CheckpointError(f"{path} is no index with a weight_map: {error!r}") from error
