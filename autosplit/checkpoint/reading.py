"""What a checkpoint has, whoever wrote it, read without running anything that it contains.

Whatever its form, its entries are told as torch.distributed.checkpoint tells its own, whose planner
says which parts of them make up a tensor. Each part is held against its checksum before it is used:
the SHA-256 that ``save_checkpoint`` notes, else the CRC-32 that ``torch.save`` writes.
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

from autosplit.errors import CheckpointError
from autosplit.torch_internals.checkpoint import unpickled_metadata

from .plain import load_plain

METADATA = ".metadata"
SAVED = "save-" + "[0-9a-f]" * 16
"""What the folder's name is like in which a save has its files."""
_INDEX = "*.index.json"
_WRAPPERS = ("model", "state_dict")


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Inside, whatever goes wrong is a ``CheckpointError``: a file can be wrong in any way."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot read {what}: {error}") from error


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint has.

    Attributes:
        path: where it is.
        identity: tells it from others, without its tensors being read.
        metadata: its entries and their parts.
        open: gives a part, on the CPU, which is whole as far as checksums show.
    """

    path: Path
    identity: str
    metadata: Metadata
    open: Callable[[MetadataIndex], Any]

    def under(self, prefix: str) -> dict[str, str]:
        """Entries whose names begin so, by the rest of the name."""
        found = self.metadata.state_dict_metadata
        return {key.removeprefix(prefix): key for key in found if key.startswith(prefix)}

    @cached_property
    def model(self) -> dict[str, str]:
        """The entries of the model's tensors, by name."""
        paths = (self.metadata.planner_data or {}).values()
        if any(tuple(each)[:1] == ("model",) and len(each) > 1 for each in paths):
            own = self.under("model.")
        else:  # a state dict by itself
            others = ("optimizer.", "autosplit.")
            own = {name: key for name, key in self.under("").items() if not key.startswith(others)}
        return {name: key for name, key in own.items() if self.tensor(key)}

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """Shape, dtype and parts of an entry that is a tensor."""
        found = self.metadata.state_dict_metadata[key]
        return found if isinstance(found, TensorStorageMetadata) else None

    def part(self, index: MetadataIndex) -> Any:
        """A part of an entry.

        Raises:
            CheckpointError: it is missing or damaged, as far as its form shows that.
        """
        value, entry = self.open(index), self.tensor(index.fqn)
        if entry is None:
            return value
        sizes = next(each.sizes for each in entry.chunks if each.offsets == index.offset)
        dtype = entry.properties.dtype
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{index.fqn} is a {type(value).__name__} and no tensor")
        if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            raise CheckpointError(f"{index.fqn} is no dense tensor with values: {value.layout}")
        if value.shape != sizes or value.dtype != dtype:
            raise CheckpointError(
                f"{index.fqn} is damaged: expected {dtype} {list(sizes)}, came "
                f"{value.dtype} {list(value.shape)}"
            )
        return value

    def verify(self, key: str) -> None:
        """Read an entry, to find out whether it is as it was written."""
        for index in _parts(self.metadata, key):
            self.part(index)

    def fill(self, key: str, tensor: Tensor) -> None:
        """Read an entry into a tensor of its shape, or what a rank has of one that is sharded."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({key: tensor}, self.metadata)
        for item in planner.create_local_plan().items:
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            part = self.part(item.storage_index)[tuple(slice(at, at + n) for at, n in spans)]
            planner.resolve_tensor(item).copy_(part)

    def read(self, key: str) -> Any:
        """A whole entry."""
        if (kind := self.tensor(key)) is None:
            return self.part(MetadataIndex(key))
        whole = torch.empty(kind.size, dtype=kind.properties.dtype, device="cpu")
        self.fill(key, whole)
        return whole


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, for ``load_state_dict`` of a model that is not cut.

    Nothing in it is run, whoever wrote it: only tensors and plain values are read.

    Args:
        path: a file of ``torch.save``, with a state dict or a dict with one under "model" or
            "state_dict"; a ``.safetensors`` file; a folder with such a file, or with several and
            an index as transformers writes them; or a folder of torch.distributed.checkpoint,
            with a state dict or one under "model".

    Raises:
        CheckpointError: there is none, or of another kind, or it is damaged.
    """
    found = open_checkpoint(path)
    return {name: found.read(key) for name, key in found.model.items()}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Whatever is at ``path``, see ``read_checkpoint``.

    Raises:
        CheckpointError: there is none, or of another kind.
    """
    path = Path(path)
    with reading(path):
        if (path / METADATA).exists():
            return _distributed(path)
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint at {path}")
        tensors = _of_folder(path) if path.is_dir() else _of_file(path)
        entries: dict[str, Any] = {
            name: BytesStorageMetadata()
            if each is None
            else TensorStorageMetadata(
                TensorProperties(each.dtype),
                each.shape,
                [ChunkStorageMetadata(torch.Size([0] * each.dim()), each.shape)],
            )
            for name, (each, _) in tensors.items()
        }

        def opened(index: MetadataIndex) -> Tensor | None:
            tensor, verify = tensors[index.fqn]
            verify()
            return tensor

        identity = hashlib.sha256(repr(entries).encode()).hexdigest()
        return Checkpoint(path, identity, Metadata(entries), opened)


_Tensors = Mapping[str, tuple[Tensor | None, Callable[[], None]]]
"""Tensors of files by name, mapped into memory, not read; each with what verifies its file. None
for what is there and cannot be taken up.
"""


def _of_folder(path: Path) -> _Tensors:
    found = sorted(path.glob(_INDEX)) or sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        listed = ", ".join(sorted(file.name for file in path.iterdir())[:10])
        unfinished = any(path.glob(SAVED))
        raise CheckpointError(
            f"expected in {path} the .metadata of torch.distributed.checkpoint, one {_INDEX} or "
            f"one .safetensors file; there is {listed or 'nothing'}: "
            + ("a save that did not get to its end" if unfinished else "give the path of one file")
        )
    return _indexed(found[0]) if found[0].suffix == ".json" else _of_file(found[0])


def _indexed(path: Path) -> _Tensors:
    """Of several files, of an index that says in which of them each is."""
    try:
        places = dict(json.loads(path.read_text())["weight_map"])
        away = [file for file in places.values() if _leads_out(file)]
    except Exception as error:  # JSON can be wrong in any way
        raise CheckpointError(f"{path} is no index with a weight_map: {error!r}") from error
    if away:
        raise CheckpointError(f"{path} leads out of its folder, to {away[0]}")
    files = {file: _of_file(path.parent / file) for file in sorted({*places.values()})}
    absent = [f"{name} in {file}" for name, file in places.items() if name not in files[file]]
    if absent:
        raise CheckpointError(f"{path} promises what is not there: {'; '.join(absent)}")
    return {name: files[file][name] for name, file in places.items()}


def _of_file(path: Path) -> _Tensors:
    """Of one file. Pipes and devices, which would be waited for, are refused as well."""
    if not path.is_file():
        raise CheckpointError(f"expected a file at {path}; there is none, or it is none")
    if path.suffix == ".safetensors":  # has no checksums, only a length that must be right
        return {name: (each, lambda: None) for name, each in _safetensors(path).items()}
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"  # as torch.load looks for it
    found = load_plain(path, path, mmap=zipped)
    # The old form has no checksums either.
    verify = cache(lambda: _check_archive(path, path) if zipped else None)
    return {name: (each, verify) for name, each in _tensors_of(found, path).items()}


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(
            f"reading {path} needs safetensors: pip install autosplit[safetensors]"
        ) from error
    return dict(load_file(path))


def _tensors_of(found: Any, path: Path) -> dict[str, Tensor | None]:
    """The tensors of what a file contained, and whether it had an optimizer beside them: its state
    is by number there, and whose numbers nobody knows.
    """
    beside: list[Any] = []
    for wrapper in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            for value in found.values():
                beside += value if isinstance(value, list) else [value]
            found = found[wrapper]
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"expected {path} to hold a state dict; it holds a {type(found).__name__}"
        )
    tensors: dict[str, Tensor | None] = {
        name: value for name, value in found.items() if isinstance(value, Tensor)
    }
    if unnamed := [name for name in tensors if not isinstance(name, str)]:
        raise CheckpointError(f"expected names in {path}; one is {unnamed[0]!r}")
    if any(isinstance(each, Mapping) and "param_groups" in each for each in beside):
        tensors["optimizer.param_groups"] = None
    return tensors


def _distributed(path: Path) -> Checkpoint:
    """Of a folder of torch.distributed.checkpoint; every process reads what it wants by itself."""
    content = (path / METADATA).read_bytes() if (path / METADATA).is_file() else b""
    metadata = read_metadata(content, path / METADATA)
    sound: set[MetadataIndex] = set()

    def opened(index: MetadataIndex) -> Any:
        info = metadata.storage_data[index]
        file = path / info.relative_path
        what = f"{index.fqn} in {file}"
        with reading(file), file.open("rb") as stream:
            if stream.seek(0, io.SEEK_END) < info.offset + info.length:
                raise CheckpointError(f"{file} is cut off")
            stream.seek(info.offset)
            found = stream.read(info.length)
        if index not in sound:
            _check_sum(found, getattr(info, "sha256", None), what)
            sound.add(index)
        return load_plain(found, what)

    return Checkpoint(path, hashlib.sha256(content).hexdigest(), metadata, opened)


def _check_sum(content: bytes, expected: str | None, what: str) -> None:
    if expected is None:
        _check_archive(io.BytesIO(content), what)
    elif hashlib.sha256(content).hexdigest() != expected:
        raise CheckpointError(f"{what} is damaged: it is not what was written (another SHA-256)")


def _check_archive(file: Path | BinaryIO, what: object) -> None:
    """Compare what ``torch.save`` wrote with its checksums, as far as it wrote any."""
    try:
        with zipfile.ZipFile(file) as archive:
            # With torch.serialization.set_crc32_options(False) all are zero.
            wrong = archive.testzip() if any(each.CRC for each in archive.infolist()) else None
    except Exception as error:
        raise CheckpointError(f"{what} is damaged: {error}") from error
    if wrong is not None:
        raise CheckpointError(f"{what} is damaged: the checksum of {wrong} is another")


def _leads_out(file: str) -> bool:
    """Whether the name of a file, as a checkpoint has it, leads out of the checkpoint's folder."""
    path = PurePosixPath(file.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or ":" in file


def read_metadata(content: bytes, path: Path) -> Metadata:
    """What a ``.metadata`` says, held against the form that torch writes, and where one of ours,
    which notes digests, against its own at its end. Torch's own reader looks at none of this, and
    leaves memory as it is where nothing is said of it.

    Raises:
        CheckpointError: it asks for something else than such a file does, or makes no sense.
    """
    try:
        found = unpickled_metadata(content)
        if not isinstance(found, Metadata):
            raise CheckpointError(f"it is damaged: expected a Metadata, came a {type(found)}")
        _check_places(found)
        noted = any(hasattr(info, "sha256") for info in found.storage_data.values())
        if noted and hashlib.sha256(content[:-32]).digest() != content[-32:]:
            raise CheckpointError("it is damaged: it is not what was written (another SHA-256)")
    except Exception as error:  # a pickle can be wrong in any way
        wrong = error if isinstance(error, CheckpointError) else f"it is damaged: {error!r}"
        raise CheckpointError(f"cannot read {path}: {wrong}") from error
    return found


def _parts(found: Metadata, name: str) -> list[MetadataIndex]:
    chunks = getattr(found.state_dict_metadata[name], "chunks", None)
    if chunks is None:
        return [MetadataIndex(name)]
    return [MetadataIndex(name, each.offsets) for each in chunks]


def _check_places(found: Metadata) -> None:
    """Parts cover their entries, and no two share bytes: torch writes each by itself."""
    places = []
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_cover(name, entry)
        for index in _parts(found, name):
            info = found.storage_data[index]
            if info.transform_descriptors:
                raise CheckpointError("it was written through extensions, which are not read here")
            if _leads_out(info.relative_path):
                raise CheckpointError(f"it leads out of the folder, to {info.relative_path}")
            places.append((info.relative_path, info.offset, info.length, name))
    for (file, start, length, name), (other, later, _, second) in pairwise(sorted(places)):
        if file == other and start + length > later:
            raise CheckpointError(f"it is damaged: {name} and {second} are in one place of {file}")


def _check_cover(name: str, entry: TensorStorageMetadata) -> None:
    for chunk in entry.chunks:
        spans = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        if not all(0 <= at <= at + size <= whole for at, size, whole in spans):
            raise CheckpointError(f"a part of {name} is outside its shape {list(entry.size)}")
    covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    distinct = len({chunk.offsets for chunk in entry.chunks}) == len(entry.chunks)
    if covered != math.prod(entry.size) or not distinct:
        raise CheckpointError(f"the parts of {name} are not its shape {list(entry.size)}")
