"""Checkpoints of whole models on disk, read one tensor at a time."""

from __future__ import annotations

import contextlib
import json
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from autosplit.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_INDEX = "*.index.json"
_WRAPPERS = ("model", "state_dict")


class Reader(Protocol):
    """A checkpoint of a whole model."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Of its tensors, by name."""
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors ``names``, on the CPU."""
        ...


def open_checkpoint(path: str | Path) -> Reader:
    """A reader for whatever is at ``path``.

    Args:
        path: a file of ``torch.save``, with a state dict or a dict with one under "model" or
            "state_dict"; a ``.safetensors`` file; a folder with such a file, or with several and
            an index as transformers writes them; or a folder of torch.distributed.checkpoint,
            with a state dict or one under "model".

    Raises:
        CheckpointError: there is none, or of another kind.
    """
    path = Path(path)
    if path.is_dir():
        if (path / ".metadata").exists():
            return DistributedFolder(path)
        return _of_files(path)
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}")
    return SafetensorsFile(path) if path.suffix == ".safetensors" else StateDictFile(path)


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, for ``load_state_dict`` of a model that is not cut.

    Raises:
        CheckpointError: as for ``open_checkpoint``.
    """
    reader = open_checkpoint(path)
    return reader.read(reader.shapes)


class StateDictFile:
    """A file of ``torch.save``; its tensors are mapped into memory, not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = torch.load(
                path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
            )
        except Exception as error:
            raise CheckpointError(f"cannot read {path} as a state dict: {error}") from error
        self._tensors = _tensors_of(found, path)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in names}


class SafetensorsFile:
    """One file of safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            names = list(file.keys())
            self.shapes = {n: torch.Size(file.get_slice(n).get_shape()) for n in names}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        with self._open() as file:
            return {name: file.get_tensor(name) for name in names}

    def _open(self) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise CheckpointError(
                f"reading {self.path} needs safetensors: pip install autosplit[safetensors]"
            ) from error
        try:
            return safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {self.path}: {error}") from error


class IndexedFiles:
    """Several files and an index that says in which of them each tensor is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._files: dict[str, str] = json.loads(path.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is no index with a weight_map: {error!r}") from error
        self._readers = {
            file: open_checkpoint(path.parent / file) for file in set(self._files.values())
        }
        absent = [n for n, file in self._files.items() if n not in self._readers[file].shapes]
        if absent:
            listed = "; ".join(f"{name} in {self._files[name]}" for name in absent)
            raise CheckpointError(f"{path} promises what is not there: {listed}")
        self.shapes = {name: self._readers[file].shapes[name] for name, file in self._files.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        names = list(names)
        found: dict[str, Tensor] = {}
        for file in dict.fromkeys(self._files[name] for name in names):
            found |= self._readers[file].read(n for n in names if self._files[n] == file)
        return {name: found[name] for name in names}


class DistributedFolder:
    """A folder of torch.distributed.checkpoint; every process reads what it wants by itself.

    Attributes:
        optimizer: names of what it has of an optimizer, flattened as ``get_optimizer_state_dict``
            with ``flatten_optimizer_state_dict`` does.
    """

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.path = path
        try:
            metadata: Metadata = FileSystemReader(path).read_metadata()
        except Exception as error:
            raise CheckpointError(f"cannot read {path}/.metadata: {error}") from error
        paths = metadata.planner_data or {}
        wrapped = any(tuple(p)[:1] == ("model",) and len(p) > 1 for p in paths.values())
        self._prefix = "model." if wrapped else ""
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.shapes = {
            key.removeprefix(self._prefix): entry.size
            for key, entry in self._tensors.items()
            if key.startswith(self._prefix) and (wrapped or not key.startswith("optimizer."))
        }
        keys = metadata.state_dict_metadata
        self.optimizer = [k.removeprefix("optimizer.") for k in keys if k.startswith("optimizer.")]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return self._read(self._prefix, names)

    def read_optimizer(self, names: Iterable[str]) -> dict[str, Any]:
        """What ``optimizer`` has under ``names``."""
        return self._read("optimizer.", names)

    def _read(self, prefix: str, names: Iterable[str]) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_loader import load

        state: dict[str, Any] = {}
        for key in (prefix + name for name in names):
            entry = self._tensors.get(key)
            form = None if entry is None else (entry.size, entry.properties.dtype)
            state[key] = None if form is None else torch.empty(form[0], dtype=form[1])
        if state:
            with unworried():
                load(state, checkpoint_id=self.path, no_dist=True)
        return {key.removeprefix(prefix): value for key, value in state.items()}


@contextlib.contextmanager
def unworried() -> Iterator[None]:
    """Without torch's warning that there is one process, which it gives even if told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _of_files(path: Path) -> Reader:
    """The reader of a folder with files of tensors."""
    found = sorted(path.glob(_INDEX)) or sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        listed = ", ".join(sorted(file.name for file in path.iterdir())[:10])
        raise CheckpointError(
            f"expected in {path} the .metadata of torch.distributed.checkpoint, one {_INDEX} or "
            f"one .safetensors file; there is {listed or 'nothing'}: give the path of one file"
        )
    return IndexedFiles(found[0]) if found[0].suffix == ".json" else SafetensorsFile(found[0])


def _tensors_of(found: Any, path: Path) -> dict[str, Tensor]:
    """The tensors of what a file contained."""
    for wrapper in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"expected {path} to hold a state dict; it holds a {type(found).__name__}"
        )
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
