"""The ``.metadata`` of torch.distributed.checkpoint, read without running anything that it names.

It is a pickle, and unpickling calls whatever a file asks for. Here that is refused, but for what
such a file is made of.
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
    """Makes tuples, dictionaries, dtypes, paths and torch's records, and nothing else.

    In Python: the one in C takes memory for as many objects as a file says that it has.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith("torch.distributed."):
            if name in _RECORDS:
                return _RECORDS[name]
            if name.endswith("MEM_FORMAT_ENCODING"):  # torch 2.2 has it elsewhere
                return _MEM_FORMAT_ENCODING
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return PurePosixPath
        if (module, name) in _CALLABLES:
            return _CALLABLES[module, name]
        raise CheckpointError(
            f"it asks for {module}.{name}, which torch.distributed.checkpoint never writes there: "
            "reading it as a pickle could run code. Nothing was run"
        )

    def load_build(self) -> None:
        """Set the attributes of an object: not those of a class, nor of what others have, too."""
        kind = type(self.stack[-2])
        if kind not in _RECORDS.values():
            raise CheckpointError(f"it would change a {kind.__name__}, which torch never writes")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def unpickled_metadata(content: bytes) -> Any:
    """What the bytes of a ``.metadata`` file say, if it is anything.

    Raises:
        CheckpointError: they ask for something else than such a file does.
        Exception: of any kind, they make no sense.
    """
    return _Unpickler(io.BytesIO(content)).load()
