"""The sound files that are damaged, and who judges what is read of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.validation.torch_csv import write_csv
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.costs import BlockCost, ModelCosts
from autosplit.planner.plan import partition

from .judge import check_csv, check_plan


@dataclass(frozen=True)
class Subject:
    """Files of one kind.

    Attributes:
        sound: what they held before.
        is_json: whether their values can be changed, besides their bytes.
        check: see ``judge``.
    """

    sound: bytes
    is_json: bool
    check: Callable[[Path], None]


def schedules(form: str, name: str = "zb-v") -> Subject:
    """Files of schedules, as torch's."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "file.csv")
        write_csv(build(name, 4, 4), file, form)
        return Subject(file.read_bytes(), False, check_csv(form))


def plans() -> Subject:
    """Files of plans."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    inputs = torch.randn(2, 8)
    whole = WholeModel.capture(model, inputs)
    count = len(whole.blocks)
    cost = BlockCost(1.0, 1.0, 1.0, 4.0, 3.0, 1.0, 2.0)
    costs = ModelCosts((cost,) * count, (2.0,) * (count - 1))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        partition(model, inputs, stages=2, microbatches=3, costs=costs).save(file)
        return Subject(file.read_bytes(), True, check_plan(whole))


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "schedules, computation only": lambda: schedules("compute_only"),
    "schedules with messages": lambda: schedules("compute_comms"),
    "schedules without a split backward": lambda: schedules("compute_only", "interleaved"),
    "plans": plans,
}
