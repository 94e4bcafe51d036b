"""The ``.metadata`` of torch.distributed.checkpoint, held against the form that torch writes.

Torch's own reader looks at none of this, and leaves memory as it is where nothing is said of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from autosplit.errors import CheckpointError
from autosplit.torch_internals.checkpoint import unpickled_metadata

from .files import leads_out


class Chunk(NamedTuple):
    """A part of a tensor, or all of an entry that is none, as it lies in a file.

    Attributes:
        file: its file, from the folder of the checkpoint.
        start: its first byte there.
        length: how many bytes it has.
        offsets: where it begins in the tensor.
        sizes: its shape.
    """

    file: str
    start: int
    length: int
    offsets: torch.Size
    sizes: torch.Size


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
    chunks: Sequence[Chunk]


def read_metadata(path: Path) -> tuple[dict[str, Stored], bool]:
    """The entries of a checkpoint by name, and whether it was saved as a dictionary that has the
    model's state under "model".

    Raises:
        CheckpointError: the file asks for something else than such a file does, or makes no sense.
    """
    try:
        found = unpickled_metadata(path.read_bytes() if path.is_file() else b"")
        if not isinstance(found, Metadata):
            raise CheckpointError(f"it is damaged: expected a Metadata, came a {type(found)}")
        entries = _entries(found)
        paths = (found.planner_data or {}).values()
        return entries, any(tuple(each)[:1] == ("model",) and len(each) > 1 for each in paths)
    except Exception as error:  # a pickle can be wrong in any way
        wrong = error if isinstance(error, CheckpointError) else f"it is damaged: {error!r}"
        raise CheckpointError(f"cannot read {path}: {wrong}") from error


def _entries(found: Metadata) -> dict[str, Stored]:
    entries: dict[str, Stored] = {}
    places: Any = found.storage_data
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            nothing = torch.Size()
            chunk = _chunk(places[MetadataIndex(name)], nothing, nothing)
            entries[name] = Stored(None, None, [chunk])
            continue
        chunks = [
            _chunk(places[MetadataIndex(name, each.offsets)], each.offsets, each.sizes)
            for each in entry.chunks
        ]
        entries[name] = Stored(torch.Size(entry.size), entry.properties.dtype, chunks)
        _check_cover(name, entry.size, chunks)
    _check_apart(entries)
    return entries


def _chunk(info: Any, offsets: torch.Size, sizes: torch.Size) -> Chunk:
    if info.transform_descriptors:
        raise CheckpointError("it was written through extensions, which are not read here")
    if leads_out(info.relative_path):
        raise CheckpointError(f"it leads out of the folder, to {info.relative_path}")
    numbers = info.offset, info.length, *offsets, *sizes
    if any(type(each) is not int or each < 0 for each in numbers):
        raise CheckpointError(f"it is damaged: expected sizes and offsets, came {numbers}")
    return Chunk(info.relative_path, info.offset, info.length, offsets, sizes)


def _check_cover(name: str, shape: torch.Size, chunks: Sequence[Chunk]) -> None:
    for chunk in chunks:
        ends = [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise CheckpointError(f"a part of {name} is outside its shape {list(shape)}")
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(shape) or len({chunk.offsets for chunk in chunks}) != len(chunks):
        raise CheckpointError(f"the parts of {name} are not its shape {list(shape)}")


def _check_apart(entries: Mapping[str, Stored]) -> None:
    """No two parts share bytes: torch writes each by itself."""
    parts = sorted((*chunk[:3], name) for name, each in entries.items() for chunk in each.chunks)
    for (file, start, length, name), (other, later, _, second) in pairwise(parts):
        if file == other and start + length > later:
            raise CheckpointError(f"it is damaged: {name} and {second} are in one place of {file}")
