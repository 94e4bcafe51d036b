"""Checkpoints in one file, and how such files tell that they are damaged."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from autosplit.errors import CheckpointError

_WRAPPERS = ("model", "state_dict")


class StateDictFile:
    """A file of ``torch.save``; its tensors are mapped into memory, not read.

    ``verify`` compares the checksums that ``torch.save`` writes, unless it was told not to, or in
    its old form, which has none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_is_file(path)
        self._verified = False
        try:
            self._zip = _starts_as_zip(path)
            found = torch.load(path, map_location="cpu", mmap=self._zip, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"cannot read {path} as a state dict: {error}") from error
        self._tensors = _tensors_of(found, path)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.kinds = {name: kind_of(tensor.dtype) for name, tensor in self._tensors.items()}

    @property
    def identity(self) -> str:
        return _summary((name, *shape) for name, shape in self.shapes.items())

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
        _check_is_file(path)
        with self._open() as file:
            try:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                self.shapes = {n: torch.Size(part.get_shape()) for n, part in slices.items()}
                self.kinds = {n: _kind_called(part.get_dtype()) for n, part in slices.items()}
            except Exception as error:
                raise CheckpointError(f"cannot read {path}: {error}") from error

    @property
    def identity(self) -> str:
        return _summary((name, *shape) for name, shape in self.shapes.items())

    def verify(self, names: Iterable[str]) -> None:
        self._open()  # looks at the length again

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        with self._open() as file:
            try:
                return {name: file.get_tensor(name) for name in names}
            except Exception as error:
                raise CheckpointError(f"cannot read {self.path}: {error}") from error

    def _open(self) -> Any:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise CheckpointError(
                f"reading {self.path} needs safetensors: pip install autosplit[safetensors]"
            ) from error
        try:
            return safe_open(self.path, framework="pt")
        except Exception as error:
            raise CheckpointError(f"cannot read {self.path}: {error}") from error


def check_archive(file: Path | BinaryIO, what: str) -> None:
    """Compare what ``torch.save`` wrote with its checksums, as far as it wrote any.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise CheckpointError(f"{what} is damaged: torch.save does not compress")
            # With torch.serialization.set_crc32_options(False) all are zero.
            checked = any(record.CRC for record in records)
            wrong = archive.testzip() if checked else None
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what} is damaged: {error}") from error
    if wrong is not None:
        raise CheckpointError(f"{what} is damaged: the checksum of {wrong} is another")


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


def _starts_as_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"  # as torch.load looks for it


def _check_is_file(path: Path) -> None:
    """Refuse pipes and devices as well, which would be waited for."""
    if not path.is_file():
        raise CheckpointError(f"expected a file at {path}; there is none, or it is none")


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


def check_dense(value: Tensor, what: str) -> None:
    """Refuse what could not be copied into a parameter.

    Raises:
        CheckpointError: it is sparse, nested, quantized, or has no values.
    """
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        raise CheckpointError(f"{what} is no dense tensor with values: {value.layout}")


def _summary(parts: Iterable[tuple[object, ...]]) -> str:
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()
