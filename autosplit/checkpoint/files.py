"""What a checkpoint has, and those in files of tensors; how they tell that they are damaged.

And values that can be read back from a checkpoint without running anything.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from numbers import Integral, Real
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch import Tensor

from autosplit.errors import CheckpointError

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
class Entry:
    """One tensor or plain value of a checkpoint.

    Attributes:
        shape: of a tensor; None: it is none.
        kind: of a tensor's values, see ``kind_of``.
        read: gives it, on the CPU.
        verify: finds out whether what it is read from is as it was written. Raises CheckpointError:
            it is missing or damaged, as far as its form shows that.
    """

    shape: torch.Size | None
    kind: str
    read: Callable[[], Any]
    verify: Callable[[], None]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint has. Opening and reading one runs nothing that it contains.

    Attributes:
        path: where it is.
        identity: tells it from others, without its tensors being read.
        model: its tensors, by name.
        optimizer: what it has of an optimizer, flattened as ``get_optimizer_state_dict`` with
            ``flatten_optimizer_state_dict`` does.
        run: what it has of the run: its step, random generators and so on.
    """

    path: Path
    identity: str
    model: Mapping[str, Entry]
    optimizer: Mapping[str, Entry] = field(default_factory=dict)
    run: Mapping[str, Entry] = field(default_factory=dict)


def read_all(entries: Iterable[Entry]) -> list[Any]:
    """Verify entries, and then read them.

    Raises:
        CheckpointError: one is damaged.
    """
    entries = list(entries)
    for each in entries:
        each.verify()
    return [each.read() for each in entries]


def open_file(path: Path) -> dict[str, Entry]:
    """The tensors of one file. Pipes and devices, which would be waited for, are refused as well.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"expected a file at {path}; there is none, or it is none")
    with reading(path):
        return _safetensors(path) if path.suffix == ".safetensors" else _state_dict(path)


def _state_dict(path: Path) -> dict[str, Entry]:
    """Of a file of ``torch.save``; its tensors are mapped into memory, not read.

    What is verified are the checksums that ``torch.save`` writes, unless it was told not to, or in
    its old form, which has none.
    """
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"  # as torch.load looks for it
    with reading(f"{path} as a state dict"):
        found = torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)
    verify = cache(lambda: check_archive(path, str(path)) if zipped else None)
    return _entries(_tensors_of(found, path), verify)


def _safetensors(path: Path) -> dict[str, Entry]:
    """Of safetensors, mapped likewise; there are no checksums, only a length that must be right."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(
            f"reading {path} needs safetensors: pip install autosplit[safetensors]"
        ) from error
    file: Any = safe_open(path, framework="pt")
    return _entries({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _entries(
    tensors: Mapping[str, Tensor], verify: Callable[[], None] = lambda: None
) -> dict[str, Entry]:
    return {
        name: Entry(each.shape, kind_of(each.dtype), partial(tensors.__getitem__, name), verify)
        for name, each in tensors.items()
    }


def open_indexed(path: Path) -> dict[str, Entry]:
    """The tensors of several files, of an index that says in which of them each is.

    Raises:
        CheckpointError: one cannot be read, or is not in the folder of the index.
    """
    places = _weight_map(path)
    files: dict[str, dict[str, Entry]] = {}
    for file in sorted({*places.values()}):
        if leads_out(file):
            raise CheckpointError(f"{path} leads out of its folder, to {file}")
        files[file] = open_file(path.parent / file)
    absent = [f"{name} in {file}" for name, file in places.items() if name not in files[file]]
    if absent:
        raise CheckpointError(f"{path} promises what is not there: {'; '.join(absent)}")
    return {name: files[file][name] for name, file in places.items()}


def leads_out(file: str) -> bool:
    """Whether the name of a file, as a checkpoint has it, leads out of the checkpoint's folder."""
    path = PurePosixPath(file.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or ":" in file


def check_archive(file: Path | BinaryIO, what: str) -> None:
    """Compare what ``torch.save`` wrote with its checksums, as far as it wrote any.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise ValueError("torch.save does not compress")
            # With torch.serialization.set_crc32_options(False) all are zero.
            wrong = archive.testzip() if any(record.CRC for record in records) else None
    except Exception as error:
        raise CheckpointError(f"{what} is damaged: {error}") from error
    if wrong is not None:
        raise CheckpointError(f"{what} is damaged: the checksum of {wrong} is another")


def check_dense(value: Tensor, what: str) -> None:
    """Refuse what could not be copied into a parameter.

    Raises:
        CheckpointError: it is sparse, nested, quantized, or has no values.
    """
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        raise CheckpointError(f"{what} is no dense tensor with values: {value.layout}")


def load_plain(content: bytes, what: str) -> Any:
    """What ``torch.save`` wrote, if it is tensors and plain values; nothing else is made or run.

    Raises:
        CheckpointError: it is something else, or damaged.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"cannot read {what} as tensors and plain values, and nothing else is read, since that "
            f"could run code: {reason}"
        ) from error


def plain(value: Any) -> Any:
    """The same with Python's own numbers in the place of numpy's and others'."""
    if value is None or isinstance(value, bool | str | bytes | Tensor):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value) in (list, tuple, set):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {plain(key): plain(each) for key, each in value.items()}
    return value


def packed(value: Any, what: str) -> bytes:
    """``plain(value)`` as a checkpoint has it.

    Raises:
        CheckpointError: it has more than tensors and plain values.
    """
    buffer = io.BytesIO()
    try:
        torch.save(plain(value), buffer)
        load_plain(buffer.getvalue(), what)
    except Exception as error:
        raise CheckpointError(
            f"{what} has something that a checkpoint cannot have, only tensors and plain values "
            f"can be read back: {error}"
        ) from error
    return buffer.getvalue()


def kind_of(dtype: torch.dtype) -> str:
    """What values of this dtype are; they may be converted within a kind."""
    if dtype.is_complex:
        return "complex"
    return "floating point" if dtype.is_floating_point else "integer"


def _tensors_of(found: Any, path: Path) -> dict[str, Tensor]:
    """The tensors of what a file contained."""
    for wrapper in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"expected {path} to hold a state dict; it holds a {type(found).__name__}"
        )
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        check_dense(value, f"{name!r} in {path}")
        if not isinstance(name, str):
            raise CheckpointError(f"expected names in {path}; one is {name!r}")
    return tensors


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found: Any = json.loads(path.read_text())["weight_map"]
        if not all(isinstance(file, str) for file in found.values()):
            raise TypeError("files are named by strings")
        return dict(found)
    except Exception as error:  # JSON can be wrong in any way
        raise CheckpointError(f"{path} is no index with a weight_map: {error!r}") from error
