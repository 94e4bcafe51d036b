"""Folders of torch.distributed.checkpoint, read without running anything that they name.

A save of ours has a manifest of what files it wrote, with their digests: SHA-256, since processors
have instructions for it; of the digests in Python's standard library it is the fastest there.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autosplit.errors import CheckpointError

from .files import (
    Checkpoint,
    Entry,
    check_archive,
    check_dense,
    kind_of,
    load_plain,
    open_file,
    open_indexed,
    read_all,
    reading,
)

if TYPE_CHECKING:
    from .metadata import Chunk, Stored

METADATA = ".metadata"
SAVE = "save-"
"""What the folder's name begins with in which a save has its files."""
_INDEX = "*.index.json"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Whatever is at ``path``.

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
        if (path / METADATA).exists():
            return _distributed(path)
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint at {path}")
        tensors = _of_folder(path) if path.is_dir() else open_file(path)
        return Checkpoint(path, _sha256({n: each.shape for n, each in tensors.items()}), tensors)


def _of_folder(path: Path) -> dict[str, Entry]:
    found = sorted(path.glob(_INDEX)) or sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        listed = ", ".join(sorted(file.name for file in path.iterdir())[:10])
        unfinished = any(path.glob(f"{SAVE}*"))
        raise CheckpointError(
            f"expected in {path} the .metadata of torch.distributed.checkpoint, one {_INDEX} or "
            f"one .safetensors file; there is {listed or 'nothing'}: "
            + ("a save that did not get to its end" if unfinished else "give the path of one file")
        )
    return open_indexed(found[0]) if found[0].suffix == ".json" else open_file(found[0])


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, for ``load_state_dict`` of a model that is not cut.

    Raises:
        CheckpointError: as for ``open_checkpoint``, or it is damaged.
    """
    tensors = open_checkpoint(path).model
    return dict(zip(tensors, read_all(tensors.values()), strict=True))


def _distributed(path: Path) -> Checkpoint:
    """A folder of torch.distributed.checkpoint; every process reads what it wants by itself.

    What ``save_checkpoint`` wrote has a manifest and is compared with it; what others wrote, with
    the checksums that ``torch.save`` gives each entry.
    """
    from .metadata import read_metadata  # torch's takes a second to import

    stored, wrapped = read_metadata(path / METADATA)
    chunks = sorted(chunk for each in stored.values() for chunk in each.chunks)
    ends = {chunk.file: chunk.start + chunk.length for chunk in chunks}
    for file, end in ends.items():
        if not (path / file).is_file() or (path / file).stat().st_size < end:
            raise CheckpointError(f"{path / file} is missing or cut off: expected {end} bytes")
    digests, compare = _digests(path, ends), cache(_compare)
    checks = {file: partial(compare, path / file, each) for file, each in digests.items()}
    if checks:
        checks[METADATA]()
    entries = {key: _entry(path, key, each, checks) for key, each in stored.items()}
    parts = {prefix: _under(prefix, entries) for prefix in ("model.", "optimizer.", "autosplit.")}
    own = parts["model."]
    if not wrapped:
        own = {k: e for k, e in entries.items() if not k.startswith(("optimizer.", "autosplit."))}
    model = {name: each for name, each in own.items() if each.shape is not None}
    return Checkpoint(path, _sha256(stored), model, parts["optimizer."], parts["autosplit."])


def _under(prefix: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    found = {key: each for key, each in entries.items() if key.startswith(prefix)}
    return {key.removeprefix(prefix): each for key, each in found.items()}


def _sha256(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _entry(path: Path, key: str, stored: Stored, checks: Mapping[str, Callable[[], None]]) -> Entry:
    """What is read and verified, chunk by chunk; ``checks`` are of files with digests."""

    def verify() -> None:
        for chunk in stored.chunks:
            if checks:
                checks[chunk.file]()
                continue
            check_archive(io.BytesIO(_bytes(path, chunk)), f"{key} in {path / chunk.file}")
            _loaded(path, key, stored, chunk)

    kind = "" if stored.dtype is None else kind_of(stored.dtype)
    return Entry(stored.shape, kind, partial(_value, path, key, stored), verify)


def _value(path: Path, key: str, stored: Stored) -> Any:
    """The tensor or plain value of an entry."""
    parts = [_loaded(path, key, stored, chunk) for chunk in stored.chunks]
    if stored.shape is None or (len(parts) == 1 and parts[0].shape == stored.shape):
        return parts[0]
    whole = torch.zeros(stored.shape, dtype=stored.dtype, device="cpu")
    for chunk, part in zip(stored.chunks, parts, strict=True):
        pairs = zip(chunk.offsets, chunk.sizes, strict=True)
        whole[tuple(slice(at, at + size) for at, size in pairs)] = part
    return whole


def _loaded(path: Path, key: str, stored: Stored, chunk: Chunk) -> Any:
    what = f"{key} in {path / chunk.file}"
    value = load_plain(_bytes(path, chunk), what)
    if stored.shape is None:
        return value
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{what} is a {type(value).__name__} and no tensor")
    check_dense(value, what)
    if value.shape != chunk.sizes or value.dtype != stored.dtype:
        raise CheckpointError(
            f"{what} is damaged: expected {stored.dtype} {list(chunk.sizes)}, came "
            f"{value.dtype} {list(value.shape)}"
        )
    return value


def _bytes(path: Path, chunk: Chunk) -> bytes:
    with reading(path / chunk.file), (path / chunk.file).open("rb") as file:
        file.seek(chunk.start)
        return file.read(chunk.length)


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_text(digests: Mapping[str, str]) -> str:
    """A manifest as text.

    Args:
        digests: by the file's name from the folder of the checkpoint, ``.metadata`` among them.
    """
    return json.dumps({"form": 1, "sha256": dict(digests)}, indent=1)


def _digests(path: Path, files: Collection[str]) -> dict[str, str]:
    """Those of the manifest of the save that wrote this; none if ``save_checkpoint`` did not."""
    saves = {file.partition("/")[0] for file in files if file.startswith(SAVE)}
    if not saves:
        return {}
    manifest = path / min(saves) / "manifest.json"
    try:
        digests = dict(json.loads(manifest.read_text())["sha256"])
    except Exception as error:  # JSON can be wrong in any way
        raise CheckpointError(
            f"cannot read {manifest}, and without it nobody knows whether {path} is whole: "
            f"{type(error).__name__}: {error}"
        ) from error
    if unknown := sorted({*files, METADATA} - digests.keys()):
        raise CheckpointError(
            f"{path} is damaged: {', '.join(unknown)} not of the save that wrote the rest"
        )
    return digests


def _compare(path: Path, wanted: str) -> None:
    """Refuse a file with another digest than the one wanted."""
    with reading(path):
        found = digest(path)
    if found != wanted:
        raise CheckpointError(
            f"{path} is damaged: it is not what was written (its SHA-256 is another)"
        )


def parts_in_use(path: Path) -> set[str]:
    """The first parts of the names of all files that the checkpoint at ``path`` has.

    Raises:
        CheckpointError: its metadata cannot be read.
    """
    from .metadata import read_metadata

    entries, _ = read_metadata(path / METADATA)
    return {c.file.partition("/")[0] for each in entries.values() for c in each.chunks}
