"""The forms that a checkpoint may have, each of one model and written as others write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from autosplit.checkpoint import save_checkpoint
from autosplit.checkpoint.saving import without_single_process_warning
from tests.checkpoint.checkpoint_workers import train, trainer, whole


def state() -> dict[str, Tensor]:
    """Tied weights once."""
    return {name: value for name, value in whole(3).state_dict().items() if name != "5.weight"}


def own(folder: Path) -> Path:
    with trainer(whole(3), 2, ranks=1) as engine:
        train(engine, 0, 1)
        save_checkpoint(engine, folder / "it", step=1)
    return folder / "it"


def distributed(folder: Path, content: Mapping[str, Any] | None = None) -> Path:
    with without_single_process_warning():
        dcp.save({**(content or state())}, checkpoint_id=folder / "it", no_dist=True)
    return folder / "it"


def distributed_wrapped(folder: Path) -> Path:
    return distributed(folder, {"model": state()})


def one_file(folder: Path, content: Any = None, **options: bool) -> Path:
    torch.save(content or state(), folder / "it.pt", **options)
    return folder / "it.pt"


def wrapped(folder: Path) -> Path:
    return one_file(folder, {"model": state(), "step": 3})


def old_file(folder: Path) -> Path:
    return one_file(folder, _use_new_zipfile_serialization=False)


def safetensors(folder: Path, content: dict[str, Tensor] | None = None) -> Path:
    save = pytest.importorskip("safetensors.torch").save_file
    save(content or state(), folder / "it.safetensors")
    return folder / "it.safetensors"


def indexed(folder: Path) -> Path:
    """Several files of safetensors, and an index of them."""
    save, result = pytest.importorskip("safetensors.torch").save_file, folder / "it"
    result.mkdir()
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(state())}
    for file in {*files.values()}:
        save({name: state()[name] for name in files if files[name] == file}, result / file)
    (result / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return result


Write = Callable[[Path], Path]
OTHERS: tuple[Write, ...] = (
    *(one_file, wrapped, safetensors, indexed, distributed, distributed_wrapped),
)
