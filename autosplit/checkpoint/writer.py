"""Writes the files of a save with torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from autosplit.pipeline.engine.control import Control


class _StagedWriter(FileSystemWriter):
    """Names the files of a folder from the folder above it, where the metadata will be."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        folder = Path(self.path).name
        for result in chain.from_iterable(results):
            result.storage_data.relative_path = f"{folder}/{result.storage_data.relative_path}"
        super().finish(metadata, results)


def write_tensors(state: Mapping[str, Any], folder: Path, ranks: Control) -> str | None:
    """Write what the ranks have; collective over them.

    Args:
        state: of this rank.
        folder: for all ranks.
        ranks: all of them.

    Returns:
        What this rank could not do; None if it could.

    Raises:
        LostPeerError: some rank did not take part.
    """
    alone = ranks.ranks == 1
    group = None if alone else ranks.group
    try:
        with ranks.losing("the other ranks"), unworried():
            save(
                dict(state),
                storage_writer=_StagedWriter(folder),
                process_group=group,
                no_dist=alone,
            )
    except CheckpointException as error:
        own = error.failures.get(ranks.rank)
        return None if own is None else f"cannot write to {folder}: {own[0]}"
    return None


@contextlib.contextmanager
def unworried() -> Iterator[None]:
    """Without torch's warning that there is one process, which it gives even if told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
