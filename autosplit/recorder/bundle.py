"""Bundles: a folder with the files that all ranks wrote about one step.

::

    FOLDER/NAME.part/rank-0.tmp/   a rank writes its files, and flushes them
    FOLDER/NAME.part/rank-0/       its part is whole
    FOLDER/NAME/                   the parts of all ranks are there

Every rename is atomic. Ranks do not communicate, because some may have failed. A bundle whose name
ends in ``.part`` lacks the parts of some ranks. Actions of the ranks that wrote their part can be
replayed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autosplit.errors import ReplayError
from autosplit.text.files import sync_folder

_RECORD, _TENSORS = "record.json", "tensors.pt"
_FORMAT = 2
"""The format of a part. It increases when a replay reads facts that older parts lack."""


@dataclass(frozen=True)
class BundlePart:
    """One rank's part of a bundle.

    Attributes:
        path: the folder of the part.
        facts: the record of the last steps, the schedule, and facts about each stage.
        tensors: ``"state"``: parameters and buffers by stage and name; ``"kept"``: kept tensors by
            action; ``"constants"``: constants by stage, capture and program. Empty if no tensors
            were written.
    """

    path: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, Any]


def write_part(
    bundle: Path,
    rank: int,
    ranks: int,
    facts: Mapping[str, Any],
    sources: Mapping[str, str],
    tensors: Mapping[str, Any],
) -> None:
    """Write the part of a rank, completely or not at all.

    Args:
        bundle: the folder of the bundle.
        rank: this rank.
        ranks: the number of ranks.
        facts: see ``BundlePart``.
        sources: maps the path of each program to its source.
        tensors: see ``BundlePart``; if empty, no tensors are written.

    Raises:
        OSError: the part cannot be written; no file of it is left.
    """
    home = bundle.with_name(f"{bundle.name}.part")
    staged = home / f"rank-{rank}.tmp"
    try:
        staged.mkdir(parents=True)
        for name, text in {_RECORD: json.dumps({"format": _FORMAT, **facts}), **sources}.items():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).write_text(text)
        if tensors:
            torch.save(tensors, staged / _TENSORS)
        for path in staged.rglob("*.*"):
            _flush(path)
        sync_folder(staged)
        staged.replace(home / f"rank-{rank}")
        with contextlib.suppress(FileNotFoundError):  # another rank has renamed it
            sync_folder(home)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        with contextlib.suppress(OSError):
            home.rmdir()
        raise
    if all((home / f"rank-{number}").is_dir() for number in range(ranks)):
        with contextlib.suppress(OSError):  # another rank has renamed it
            home.replace(bundle)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_parts(folder: Path) -> dict[int, BundlePart]:
    """The parts of a bundle by rank.

    Raises:
        ReplayError: the folder is not a bundle, has another format, or a file of it cannot be read.
    """
    parts = {}
    for path in sorted(folder.glob("rank-*")):
        if path.suffix == ".tmp":
            continue
        try:
            facts, tensors = json.loads((path / _RECORD).read_text()), {}
            if (path / _TENSORS).exists():
                # Only tensors that a replay uses are read.
                tensors = torch.load(path / _TENSORS, weights_only=True, mmap=True)
        except Exception as error:
            raise ReplayError(f"cannot read {path}: {type(error).__name__}: {error}") from error
        if facts.get("format") != _FORMAT:
            raise ReplayError(
                f"{path} has format {facts.get('format', 0)}, and this version of autosplit "
                f"replays format {_FORMAT}: use the version that wrote it"
            )
        parts[facts["rank"]] = BundlePart(path, facts, tensors)
    if not parts:
        raise ReplayError(
            f"{folder} is no bundle of the flight recorder: expected folders rank-0, rank-1 ... in "
            "it. Pass one of the folders inside Recorder(folder=...)"
        )
    return parts


def differing_copies(parts: Mapping[int, BundlePart]) -> list[str]:
    """Texts on the parameters, buffers and gradients that differ between replicas. Each text lists
    the ranks; those with which the fewest others agree come first.
    """
    ranks_by_bits: dict[tuple[str, tuple[int, ...]], dict[str, list[int]]] = {}
    for rank, part in parts.items():
        step, copies = part.facts["steps"][-1], tuple(part.facts["copies"])
        for kind in ("state", "gradients"):
            for stage, digests in step[kind].items():
                prefix = part.facts["stages"].get(stage, {}).get("prefix", "")
                for name, (*_, bits, _) in digests.items():
                    shown = f"{name.removeprefix(prefix)} of stage {stage}"
                    text = f"{'gradient of ' * (kind == 'gradients')}{shown}"
                    rows = ranks_by_bits.setdefault((text, copies), {})
                    rows.setdefault(bits, []).append(rank)
    return [
        f"{text} differs between the ranks {' and '.join(map(str, sorted(rows.values(), key=len)))}"
        for (text, _), rows in ranks_by_bits.items()
        if len(rows) > 1
    ]
