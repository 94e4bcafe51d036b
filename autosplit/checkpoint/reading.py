"""Read a checkpoint of any format, without running any code in it.

The entries of every format are described by metadata of torch.distributed.checkpoint, so torch's
planner finds the parts of each tensor. Each part is compared with its checksum before it is used:
the SHA-256 that ``save_checkpoint`` records, or the CRC-32 that ``torch.save`` writes.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from autosplit.backends.backend import collecting_new_objects_only
from autosplit.errors import CheckpointError
from autosplit.torch_internals.checkpoint import unpickled_metadata

from .plain import load_plain

METADATA = ".metadata"
SAVED = "save-" + "[0-9a-f]" * 16
"""Pattern of the folder with the files of one save."""
_INDEX = "*.index.json"
_WRAPPERS = ("model", "state_dict")

_SMALL = 4096  # bytes of an entry that is kept in memory
# Entries that may be kept: readers copy tensors, and cannot change the others.
_UNSHARED = (Tensor, str, int, float, type(None))

_REMEDY = ". Load another checkpoint, or copy this one again"


@contextmanager
def reading(subject: object) -> Iterator[None]:
    """Context that turns any exception into a ``CheckpointError``, because a file can be wrong in
    any way.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot read {subject}: {error}") from error


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint.

    Attributes:
        path: the path of the checkpoint.
        identity: a digest that distinguishes the checkpoint from others; no tensor is read for it.
        metadata: the entries of the checkpoint, and their parts.
        open: a function that returns a part, on the CPU, after verifying its checksum.
    """

    path: Path
    identity: str
    metadata: Metadata
    open: Callable[[MetadataIndex], Any]

    def under(self, prefix: str) -> dict[str, str]:
        """Return the keys of entries that begin with a prefix, by the rest of the key."""
        entries = self.metadata.state_dict_metadata
        return {key.removeprefix(prefix): key for key in entries if key.startswith(prefix)}

    @cached_property
    def model(self) -> dict[str, str]:
        """Maps the name of each of the model's tensors to its entry's key."""
        paths = (self.metadata.planner_data or {}).values()
        if any(tuple(keys)[:1] == ("model",) and len(keys) > 1 for keys in paths):
            entries = self.under("model.")
        else:  # a state dict by itself
            prefixes = ("optimizer.", "autosplit.")
            entries = {
                name: key for name, key in self.under("").items() if not key.startswith(prefixes)
            }
        return {name: key for name, key in entries.items() if self.tensor(key)}

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """Shape, dtype and parts of an entry; None if it is not a tensor."""
        entry = self.metadata.state_dict_metadata[key]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def part(self, index: MetadataIndex) -> Any:
        """Read the part of an entry that ``index`` names.

        Raises:
            CheckpointError: the part is missing or damaged.
        """
        value, entry = self.open(index), self.tensor(index.fqn)
        if entry is None:
            return value
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
        dtype = entry.properties.dtype
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{index.fqn} in {self.path} is a {type(value).__name__}, not a tensor{_REMEDY}"
            )
        if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            raise CheckpointError(
                f"{index.fqn} in {self.path} is a {value.layout} tensor, quantized or without "
                "data; only dense tensors can be loaded: save it as one"
            )
        if value.shape != sizes or value.dtype != dtype:
            raise CheckpointError(
                f"{index.fqn} in {self.path} is damaged: expected {dtype} {list(sizes)}, got "
                f"{value.dtype} {list(value.shape)}{_REMEDY}"
            )
        return value

    def verify(self, key: str) -> None:
        """Read an entry to verify its checksums."""
        for index in _parts(self.metadata, key):
            self.part(index)

    def fill(self, key: str, tensor: Tensor) -> None:
        """Read an entry into a tensor of the entry's shape; of a DTensor, read the local shard."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({key: tensor}, self.metadata)
        for item in planner.create_local_plan().items:
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            part = self.part(item.storage_index)[tuple(slice(at, at + n) for at, n in spans)]
            planner.resolve_tensor(item).copy_(part)

    def read(self, key: str) -> Any:
        """Read a whole entry."""
        if (kind := self.tensor(key)) is None:
            return self.part(MetadataIndex(key))
        whole = torch.empty(kind.size, dtype=kind.properties.dtype, device="cpu")
        self.fill(key, whole)
        return whole


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint by name, for ``load_state_dict`` of an uncut model.

    No code in the checkpoint is ever run: only tensors and plain values are read.

    Args:
        path: a file of ``torch.save`` with a state dict, or with a dict that has one under "model"
            or "state_dict"; a ``.safetensors`` file; a folder with one such file, or with several
            and an index, as transformers writes them; or a folder of torch.distributed.checkpoint
            with a state dict, or with one under "model".

    Raises:
        CheckpointError: there is no checkpoint at ``path``, it has another format, or it is
            damaged.
    """
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(key) for name, key in checkpoint.model.items()}


@collecting_new_objects_only()
def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """Open the checkpoint at ``path``, in any format of ``read_checkpoint``. An open checkpoint is
    returned as it is.

    Raises:
        CheckpointError: there is no checkpoint at ``path``, or it has another format.
    """
    if isinstance(path, Checkpoint):
        return path
    path = Path(path)
    with reading(path):
        if (path / METADATA).exists():
            return _distributed(path)
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint at {path}: check the path")
        tensors = _of_folder(path) if path.is_dir() else _of_file(path)
        entries: dict[str, Any] = {
            name: BytesStorageMetadata()
            if tensor is None
            else TensorStorageMetadata(
                TensorProperties(tensor.dtype),
                tensor.shape,
                [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)],
            )
            for name, (tensor, _) in tensors.items()
        }

        def load(index: MetadataIndex) -> Tensor | None:
            tensor, verify = tensors[index.fqn]
            verify()
            return tensor

        identity = hashlib.sha256(repr(entries).encode()).hexdigest()
        return Checkpoint(path, identity, Metadata(entries), load)


_Tensors = Mapping[str, tuple[Tensor | None, Callable[[], None]]]
"""Tensors by name, mapped into memory but not read, each with a function that verifies its file.
None stands for an entry that cannot be loaded.
"""


def _of_folder(path: Path) -> _Tensors:
    files = sorted(path.glob(_INDEX)) or sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        listed = ", ".join(sorted(file.name for file in path.iterdir())[:10])
        unfinished = any(path.glob(SAVED))
        raise CheckpointError(
            f"expected in {path} the .metadata of torch.distributed.checkpoint, one {_INDEX} or "
            f"one .safetensors file; there is {listed or 'nothing'}: "
            + ("a save was interrupted" if unfinished else "give the path of one file")
        )
    return _indexed(files[0]) if files[0].suffix == ".json" else _of_file(files[0])


def _indexed(path: Path) -> _Tensors:
    """The tensors of several files, which an index locates."""
    try:
        places = dict(json.loads(path.read_text())["weight_map"])
        outside = [file for file in places.values() if _leads_out(file)]
    except Exception as error:  # JSON can be wrong in any way
        raise CheckpointError(
            f"{path} is not an index of safetensors, because its JSON has no weight_map: {error!r}"
        ) from error
    if outside:
        raise CheckpointError(
            f"{path} names a file outside its folder: {outside[0]}. It may come from an attacker; "
            "no such file was read"
        )
    files = {file: _of_file(path.parent / file) for file in sorted({*places.values()})}
    absent = [f"{name} in {file}" for name, file in places.items() if name not in files[file]]
    if absent:
        raise CheckpointError(
            f"{path} lists tensors that its files do not contain: {'; '.join(absent)}{_REMEDY}"
        )
    return {name: files[file][name] for name, file in places.items()}


def _of_file(path: Path) -> _Tensors:
    """The tensors of one file. Pipes and devices, which would block, are refused."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a regular file{_REMEDY}")
    if path.suffix == ".safetensors":  # without checksums, only a length
        return {name: (tensor, lambda: None) for name, tensor in _safetensors(path).items()}
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"  # the check of torch.load
    content = load_plain(path, path, mmap=zipped)
    # The older format of torch.save has no checksums either.
    verify = cache(lambda: _check_archive(path, path) if zipped else None)
    return {name: (tensor, verify) for name, tensor in _tensors_of(content, path).items()}


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(
            f"reading {path} needs safetensors: pip install autosplit[safetensors]"
        ) from error
    return dict(load_file(path))


def _tensors_of(content: Any, path: Path) -> dict[str, Tensor | None]:
    """The tensors of a file, by name.

    If the file has an optimizer's state, an entry with None stands for the state. It cannot be
    loaded, because it has the numbers of parameters instead of their names.
    """
    beside: list[Any] = []
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            for value in content.values():
                beside += value if isinstance(value, list) else [value]
            content = content[wrapper]
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"expected a state dict in {path}; it has a {type(content).__name__}: save "
            "model.state_dict()"
        )
    tensors: dict[str, Tensor | None] = {
        name: value for name, value in content.items() if isinstance(value, Tensor)
    }
    if unnamed := [name for name in tensors if not isinstance(name, str)]:
        raise CheckpointError(
            f"expected strings as names of tensors in {path}; one is {unnamed[0]!r}: save "
            "model.state_dict()"
        )
    if any(isinstance(value, Mapping) and "param_groups" in value for value in beside):
        tensors["optimizer.param_groups"] = None
    return tensors


def _distributed(path: Path) -> Checkpoint:
    """Open a folder of torch.distributed.checkpoint; every process reads it independently."""
    content = (path / METADATA).read_bytes() if (path / METADATA).is_file() else b""
    metadata = read_metadata(content, path / METADATA)
    sound: set[MetadataIndex] = set()
    values: dict[str, Any] = {}  # by SHA-256: each parameter has the options of its group

    def load(index: MetadataIndex) -> Any:
        """Read one entry, and verify its checksum the first time."""
        info = metadata.storage_data[index]
        digest = getattr(info, "sha256", None)
        if index in sound and digest in values:
            return values[digest]
        file = path / info.relative_path
        subject = f"{index.fqn} in {file}"
        with reading(file), file.open("rb") as stream:
            if stream.seek(0, io.SEEK_END) < info.offset + info.length:
                raise CheckpointError(f"{file} is cut off{_REMEDY}")
            stream.seek(info.offset)
            content = stream.read(info.length)
        if index not in sound:
            _check_sum(content, digest, subject)
            sound.add(index)
        if digest in values:
            return values[digest]
        value = load_plain(content, subject)
        if digest and len(content) <= _SMALL and isinstance(value, _UNSHARED):
            values[digest] = value
        return value

    return Checkpoint(path, hashlib.sha256(content).hexdigest(), metadata, load)


def _check_sum(content: bytes, expected: str | None, subject: str) -> None:
    if expected is None:
        _check_archive(io.BytesIO(content), subject)
    elif hashlib.sha256(content).hexdigest() != expected:
        raise CheckpointError(
            f"{subject} is damaged: its SHA-256 differs from the one written{_REMEDY}"
        )


def _check_archive(file: Path | BinaryIO, subject: object) -> None:
    """Verify an archive of ``torch.save``, if it has checksums."""
    try:
        with zipfile.ZipFile(file) as archive:
            # With torch.serialization.set_crc32_options(False) all are zero.
            wrong = archive.testzip() if any(member.CRC for member in archive.infolist()) else None
    except Exception as error:
        raise CheckpointError(f"{subject} is damaged: {error}{_REMEDY}") from error
    if wrong is not None:
        raise CheckpointError(f"{subject} is damaged: the checksum of {wrong} differs{_REMEDY}")


def _leads_out(file: str) -> bool:
    """Whether a file name in a checkpoint points outside of the checkpoint's folder."""
    path = PurePosixPath(file.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or ":" in file


def read_metadata(content: bytes, path: Path) -> Metadata:
    """Read and verify a ``.metadata`` file: its structure, and for files of ``save_checkpoint`` the
    digest at its end. Torch's reader verifies nothing, and leaves memory uninitialised if a part is
    missing.

    Raises:
        CheckpointError: the file's pickle has other content than metadata, or the metadata is
            inconsistent.
    """
    try:
        metadata = unpickled_metadata(content)
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"the file is damaged: it contains a {type(metadata)}")
        _check_places(metadata)
        noted = any(hasattr(info, "sha256") for info in metadata.storage_data.values())
        if noted and hashlib.sha256(content[:-32]).digest() != content[-32:]:
            raise CheckpointError("the file is damaged: its SHA-256 differs from the one written")
    except Exception as error:  # a pickle can be wrong in any way
        wrong = error if isinstance(error, CheckpointError) else f"the file is damaged: {error!r}"
        raise CheckpointError(f"cannot read {path}: {wrong}{_REMEDY}") from error
    return metadata


def _parts(metadata: Metadata, name: str) -> list[MetadataIndex]:
    chunks = getattr(metadata.state_dict_metadata[name], "chunks", None)
    if chunks is None:
        return [MetadataIndex(name)]
    return [MetadataIndex(name, chunk.offsets) for chunk in chunks]


def _check_places(metadata: Metadata) -> None:
    """Check that parts cover their entries, and that no two parts share bytes in a file."""
    places = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_cover(name, entry)
        for index in _parts(metadata, name):
            info = metadata.storage_data[index]
            if info.transform_descriptors:
                raise CheckpointError(
                    "the checkpoint was written by a FileSystemWriter with _extensions, which are "
                    "not supported: save it without _extensions"
                )
            if _leads_out(info.relative_path):
                raise CheckpointError(
                    f"the checkpoint's .metadata names {info.relative_path}, which is outside the "
                    "checkpoint's folder: the checkpoint is damaged, load another one"
                )
            places.append((info.relative_path, info.offset, info.length, name))
    for (file, start, length, name), (other, later, _, second) in pairwise(sorted(places)):
        if file == other and start + length > later:
            raise CheckpointError(f"the file is damaged: {name} and {second} overlap in {file}")


def _check_cover(name: str, entry: TensorStorageMetadata) -> None:
    for chunk in entry.chunks:
        spans = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        if not all(0 <= at <= at + size <= whole for at, size, whole in spans):
            raise CheckpointError(
                f"the file is damaged: a part of {name} is outside its shape {list(entry.size)}"
            )
    covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    distinct = len({chunk.offsets for chunk in entry.chunks}) == len(entry.chunks)
    if covered != math.prod(entry.size) or not distinct:
        raise CheckpointError(
            f"the file is damaged: the parts of {name} do not add up to its shape "
            f"{list(entry.size)}"
        )
