"""What ranks do in tests of training by command."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch.distributed as dist

from autosplit.errors import AutosplitError
from autosplit.train.language_model import TrainSettings
from autosplit.train.preparation import prepare


def differing(folder: str) -> list[str]:
    """What each rank says where rank 1 has another text, another option, or no text at all."""
    alike = TrainSettings("tests.train.models:causal", Path(folder) / "text", 2, length=4)
    second = dist.get_rank() == 1
    said = []
    for change in (
        {"data": Path(folder) / "other"},
        {"learning_rate": 0.5},
        {"overrides": {"width": "8"}},
        {"data": Path(folder) / "nothing"},
    ):
        try:
            prepare(dataclasses.replace(alike, **change) if second else alike)  # type: ignore[arg-type]
        except AutosplitError as error:
            said.append(str(error))
    return said
