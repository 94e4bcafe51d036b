"""Checkpoints in files of tensors, read one tensor at a time; how they tell that they are damaged.

And values that can be read back from a checkpoint without running anything.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

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


class Reader(Protocol):
    """A checkpoint of a whole model. Opening and reading one runs nothing that it contains.

    Attributes:
        path: where it is.
        shapes: of its tensors, by name.
        kinds: of its tensors, by name, see ``kind_of``.
    """

    path: Path
    shapes: dict[str, torch.Size]
    kinds: dict[str, str]

    def verify(self, names: Iterable[str]) -> None:
        """Find out whether what the tensors ``names`` are read from is as it was written.

        Raises:
            CheckpointError: it is missing or damaged, as far as its form shows that.
        """
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors ``names``, on the CPU."""
        ...


class StateDictFile:
    """A file of ``torch.save``; its tensors are mapped into memory, not read.

    ``verify`` compares the checksums that ``torch.save`` writes, unless it was told not to, or in
    its old form, which has none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._verified = False
        with reading(f"{path} as a state dict"):
            with path.open("rb") as file:
                self._zip = file.read(4) == b"PK\x03\x04"  # as torch.load looks for it
            found = torch.load(path, map_location="cpu", mmap=self._zip, weights_only=True)
        self._tensors = _tensors_of(found, path)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.kinds = {name: kind_of(tensor.dtype) for name, tensor in self._tensors.items()}

    def verify(self, names: Iterable[str]) -> None:
        if self._zip and not self._verified:
            check_archive(self.path, str(self.path))
        self._verified = True

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in names}


class SafetensorsFile:
    """One file of safetensors; it has no checksums, only a length that must be right."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file, reading(path):
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            self.shapes = {n: torch.Size(part.get_shape()) for n, part in slices.items()}
            self.kinds = {n: _kind_called(part.get_dtype()) for n, part in slices.items()}

    def verify(self, names: Iterable[str]) -> None:
        self._open()  # looks at the length again

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        with self._open() as file, reading(self.path):
            return {name: file.get_tensor(name) for name in names}

    def _open(self) -> Any:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise CheckpointError(
                f"reading {self.path} needs safetensors: pip install autosplit[safetensors]"
            ) from error
        with reading(self.path):
            return safe_open(self.path, framework="pt")


class IndexedFiles:
    """Several files and an index that says in which of them each tensor is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _weight_map(path)
        readers: dict[str, Reader] = {}
        for file in sorted({*self._files.values()}):
            if leads_out(file):
                raise CheckpointError(f"{path} leads out of its folder, to {file}")
            readers[file] = open_file(path.parent / file)
        absent = [f"{n} in {f}" for n, f in self._files.items() if n not in readers[f].shapes]
        if absent:
            raise CheckpointError(f"{path} promises what is not there: {'; '.join(absent)}")
        self._readers = readers
        self.shapes = {name: readers[file].shapes[name] for name, file in self._files.items()}
        self.kinds = {name: readers[file].kinds[name] for name, file in self._files.items()}

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


def open_file(path: Path) -> Reader:
    """Of one file. Pipes and devices, which would be waited for, are refused as well."""
    if not path.is_file():
        raise CheckpointError(f"expected a file at {path}; there is none, or it is none")
    return SafetensorsFile(path) if path.suffix == ".safetensors" else StateDictFile(path)


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


def _kind_called(dtype: str) -> str:
    """Likewise, of safetensors' names, such as BF16, C64, U8, BOOL."""
    if dtype.startswith("C"):
        return "complex"
    return "floating point" if dtype.startswith(("F", "BF")) else "integer"


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
