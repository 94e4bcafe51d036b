"""Read the ``.metadata`` of torch.distributed.checkpoint without running any code that it names.

A ``.metadata`` file is a pickle, and Python's unpickler calls any function that a pickle names.
``_Unpickler`` refuses all names but those that torch writes into a ``.metadata`` file.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from autosplit.errors import CheckpointError

_RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta),
        *(TensorProperties, TensorStorageMetadata, _StorageInfo),
    )
}
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
_CALLABLES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Unpickler(pickle._Unpickler):
    """Unpickler that creates only containers, dtypes, paths and the metadata classes of
    torch.distributed.checkpoint.

    It derives from pickle's unpickler in Python, because the unpickler in C allocates as much
    memory as a file claims to need.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that the pickle names.

        Raises:
            CheckpointError: torch writes no such name into a ``.metadata``.
        """
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith("torch.distributed."):
            if name in _RECORDS:
                return _RECORDS[name]
            if name.endswith("MEM_FORMAT_ENCODING"):  # torch 2.2 has it in another module
                return _MEM_FORMAT_ENCODING
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return PurePosixPath
        if (module, name) in _CALLABLES:
            return _CALLABLES[module, name]
        raise CheckpointError(
            f"the pickle names {module}.{name}, which torch.distributed.checkpoint never writes: "
            "loading this pickle could run code. No code was run"
        )

    def load_build(self) -> None:
        """Set the attributes of a metadata object, as the pickle's opcode BUILD asks.

        Raises:
            CheckpointError: the object is not of a metadata class of torch.
        """
        kind = type(self.stack[-2])
        if kind not in _RECORDS.values():
            raise CheckpointError(
                f"the pickle would set attributes of a {kind.__name__}, which "
                "torch.distributed.checkpoint never writes: loading this pickle could run code. "
                "No code was run"
            )
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def unpickled_metadata(content: bytes) -> Any:
    """Unpickle the bytes of a ``.metadata`` file.

    Raises:
        CheckpointError: the pickle names a class or function that torch does not write.
        Exception: of any type, if the bytes are not a valid pickle.
    """
    return _Unpickler(io.BytesIO(content)).load()
