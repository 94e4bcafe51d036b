"""What the ranks run: a small trainer with a recorder and audits, in which a fault happens."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autosplit.errors import PipelineError
from autosplit.pipeline import PipelineTrainer, Recorder, RunOptions
from autosplit.pipeline.schedule.schedule import Action, ActionKind
from autosplit.trainer import auditing

from .faults import BITS, Fault, happening, messages_flipped

WIDTH, ROWS, MICROBATCHES = 16, 32, 4
_MARKED = 200.0
_STEPS = 8
"""The steps with a fault that no audit finds."""


class Block(nn.Module):
    """A residual block, with a square root that gives NaN for a marked input."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = torch.sqrt(_MARKED / 2 - x)
        moved: Tensor = self.down(torch.tanh(self.up(x))) * scale
        return x + moved / 10


@dataclass
class Outcome:
    """What a rank has seen.

    Attributes:
        action: the action in which the fault happened.
        rank: the rank of it.
        sample: the sample that was wrong, if any.
        text: the error that ended the run; empty without.
        steps: the steps from the first fault on.
        period: the period of the audits.
    """

    action: str
    rank: int
    sample: int
    text: str
    steps: int
    period: int


def _times(_: object) -> dict[tuple[int, ActionKind], float]:
    """Seconds of actions, in place of measured ones: F takes 1, backwards 3 in the first stage and
    2 in others.
    """
    return {
        (stage, kind): 1.0 if kind is ActionKind.FORWARD else 2.0 + (stage == 0)
        for stage in range(4)
        for kind in ActionKind
    }


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, ROWS, WIDTH, generator=generator)
    return inputs.clone(), targets.clone()


def _asked(metrics: Mapping[str, float]) -> bool:
    """An operator asks for the step."""
    return _asked.now  # type: ignore[attr-defined,no-any-return]


def run(fault: Fault | None, folder: str, ranks: int, steps: int) -> Outcome:
    """Train until a fault is found, or for a number of steps.

    Args:
        fault: the fault; None for clean steps.
        folder: where the recorder writes.
        ranks: the number of ranks.
        steps: the most steps after those that are measured; 0: the period of the audits if they
            find the fault, else a few.
    """
    kind, dice = fault.kind if fault else "", random.Random(fault.seed if fault else 0)
    _asked.now = False  # type: ignore[attr-defined]
    mesh = None
    if kind == "reduction":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
    stages = 2 if mesh else ranks
    alarms = ("nonfinite", "error", "memory", "replicas", _asked)
    digests: Any = "all" if kind == "held" else "boundaries"
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(mock.patch.object(auditing, "median_durations", _times))
        stack.enter_context(messages_flipped())
        options = RunOptions(
            audit=True,
            split_backward=kind == "deferred",
            recorder=Recorder(folder, alarms=alarms, digests=digests),
            timeout=60.0,
        )
        trainer = PipelineTrainer(
            Block,
            F.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            stages=stages,
            microbatches=MICROBATCHES,
            schedule="gpipe" if kind == "deferred" else "1f1b",
            mesh=mesh,
            run_options=options,
        )
        for step in range(3):
            trainer.step(_batch(step))
        auditor: Any = trainer.auditor
        period, never = auditor.period, auditor.never
        wanted = BITS.get(kind, "F")
        row = [a for rank in trainer.schedule.ranks for a in rank if a.kind.value in wanted]
        if kind in BITS:
            row = [action for action in row if action not in never]
        if kind == "reduction":
            row = [action for action in row if action.stage == 0]  # of the rank that it happens on
        if kind in ("message", "input gradient"):
            row = [action for action in row if action.stage]
        if kind in ("NaN", "target"):
            row = [action for action in row if action.stage == (0 if kind == "NaN" else stages - 1)]
        action: Action = dice.choice(row)
        rank = trainer.schedule.placement[action.stage]
        rows = ROWS // MICROBATCHES
        sample = action.microbatch * rows + dice.randrange(rows)
        outcome = Outcome(str(action), rank, sample, "", 0, period)
        _asked.now = kind in ("message", "parameter")  # type: ignore[attr-defined]
        if fault is not None and kind not in ("NaN", "target"):
            stack.enter_context(happening(fault, trainer, action))
        try:
            for step in range(steps or (period if kind in BITS else _STEPS)):
                outcome.steps += 1
                inputs, targets = _batch(3 + step)
                if kind == "NaN":
                    inputs[sample, dice.randrange(WIDTH)] = _MARKED
                if kind == "target":
                    targets[sample, dice.randrange(WIDTH)] = torch.inf
                trainer.step((inputs, targets))
            trainer.close()
        except PipelineError as error:
            outcome.text = str(error)
    return outcome
