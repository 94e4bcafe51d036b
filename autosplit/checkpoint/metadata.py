"""The ``.metadata`` of torch.distributed.checkpoint, read without running anything that it names.

It is a pickle, and unpickling calls whatever a file asks for. Here every class that such a file
may name becomes an inert record, made for one reading; anything else is refused. What the records
say is then held against the form that torch writes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch

from autosplit.errors import CheckpointError

from .files import leads_out

T = TypeVar("T")

# What of torch besides its checkpoints such a file names.
_TORCHS = {("torch.serialization", "_get_layout")}
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
# They look things up outside the file, or call what they find without its name being asked for.
_REFUSED = {
    *("PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"),
    *("INST", "OBJ", "NEXT_BUFFER", "READONLY_BUFFER"),
}


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, or all of an entry that is none, as it lies in a file.

    Attributes:
        offsets: where it begins in the tensor.
        sizes: its shape.
        file: its file, from the folder of the checkpoint.
        start: its first byte there.
        length: how many bytes it has.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Stored:
    """An entry of a checkpoint.

    Attributes:
        shape: of a tensor; None: it is none.
        dtype: likewise.
        chunks: they cover it, each place once.
    """

    shape: torch.Size | None
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """What a folder of torch.distributed.checkpoint holds.

    Attributes:
        entries: by name.
        wrapped: whether it was saved as a dictionary that has the model's state under "model".
    """

    entries: Mapping[str, Stored]
    wrapped: bool


def parse_metadata(content: bytes) -> Contents:
    """What the bytes of a ``.metadata`` file say.

    Raises:
        CheckpointError: they ask for something else than such a file does, or make no sense.
    """
    try:
        _check_opcodes(content)
        found = _Unpickler(io.BytesIO(content)).load()
        return _contents(found)
    except CheckpointError:
        raise
    except Exception as error:  # a pickle can be wrong in any way
        raise CheckpointError(f"it is damaged: {type(error).__name__}: {error}") from error


class _Record:
    """Stands for an object of the file."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *arguments: Any) -> _Record:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes tuples, dictionaries, dtypes and records, and nothing else."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # Classes of this reading alone: a pickle can set attributes of a class that it is given.
        self._records: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        torchs = module.startswith("torch.distributed.") or (module, name) in _TORCHS
        if torchs or (module.partition(".")[0] == "pathlib" and name in _PATHS):
            return self._records.setdefault(name, type(name, (_Record,), {}))
        raise CheckpointError(
            f"it asks for {module}.{name}, which torch.distributed.checkpoint never writes there: "
            "reading it as a pickle could run code. Nothing was run"
        )


def _check_opcodes(content: bytes) -> None:
    """Refuse what the unpickler would do before it asks for a class."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name in _REFUSED:
            raise CheckpointError(f"it has the opcode {opcode.name}, which torch never writes")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(str(argument)) > count:
            # The unpickler takes memory for all numbers up to this one.
            raise CheckpointError(f"it is damaged: object {argument} of {count}")


def _contents(found: Any) -> Contents:
    fields = _state(found, "Metadata")
    paths = _a(fields.get("planner_data") or {}, dict)
    wrapped = any(tuple(p)[:1] == ("model",) and len(p) > 1 for p in paths.values())
    places: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
    for index, info in _a(fields["storage_data"], dict).items():
        key = _state(index, "MetadataIndex")
        offset = key.get("offset")
        at = (_a(key["fqn"], str), None if offset is None else _numbers(offset))
        places[at] = _state(info, "_StorageInfo")
    entries = {
        _a(name, str): _stored(name, entry, places)
        for name, entry in _a(fields["state_dict_metadata"], dict).items()
    }
    _check_apart(entries)
    return Contents(entries, wrapped)


def _stored(name: str, entry: Any, places: Mapping[Any, dict[str, Any]]) -> Stored:
    if type(entry).__name__ == "BytesStorageMetadata":
        return Stored(None, None, (_chunk((), (), places[name, None]),))
    fields = _state(entry, "TensorStorageMetadata")
    dtype = _a(_state(fields["properties"], "TensorProperties", tuple)[0], torch.dtype)
    shape = torch.Size(_numbers(fields["size"]))
    chunks = []
    for each in _a(fields["chunks"], list):
        part = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _numbers(part["offsets"]), _numbers(part["sizes"])
        chunks.append(_chunk(offsets, sizes, places[name, offsets]))
    _check_cover(name, shape, chunks)
    return Stored(shape, dtype, tuple(chunks))


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], info: dict[str, Any]) -> Chunk:
    if info.get("transform_descriptors"):
        raise CheckpointError("it was written through extensions, which are not read here")
    file = _a(info["relative_path"], str)
    if leads_out(file):
        raise CheckpointError(f"it leads out of the folder, to {file}")
    start, length = _numbers((info["offset"], info["length"]))
    return Chunk(offsets, sizes, file, start, length)


def _check_cover(name: str, shape: torch.Size, chunks: list[Chunk]) -> None:
    covered = 0
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            raise CheckpointError(f"a part of {name} has other dimensions than {list(shape)}")
        ends = [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise CheckpointError(f"a part of {name} is outside its shape {list(shape)}")
        covered += math.prod(chunk.sizes)
    if covered != math.prod(shape) or len({chunk.offsets for chunk in chunks}) != len(chunks):
        raise CheckpointError(f"the parts of {name} are not its shape {list(shape)}")


def _check_apart(entries: Mapping[str, Stored]) -> None:
    """No two parts share bytes: torch writes each by itself."""
    parts = [(c.file, c.start, c.length, n) for n, e in entries.items() for c in e.chunks]
    for (file, start, length, name), (other, later, _, second) in pairwise(sorted(parts)):
        if file == other and start + length > later:
            raise CheckpointError(f"it is damaged: {name} and {second} are in one place of {file}")


def _state(found: Any, kind: str, form: type[Any] = dict) -> Any:
    """What a record of this kind holds."""
    if type(found).__name__ != kind:
        raise CheckpointError(f"it is damaged: expected a {kind}, came a {type(found).__name__}")
    return _a(found.state, form)


def _a(found: Any, kind: type[T]) -> T:
    if not isinstance(found, kind):
        raise CheckpointError(
            f"it is damaged: expected a {kind.__name__}, came a {type(found).__name__}"
        )
    return found


def _numbers(found: Any) -> tuple[int, ...]:
    values = _a(found, tuple)
    if any(type(value) is not int or not 0 <= value < 2**63 for value in values):
        raise CheckpointError("it is damaged: expected sizes and offsets")
    return values
