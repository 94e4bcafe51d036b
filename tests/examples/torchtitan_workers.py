"""Functions that test_torchtitan_stages.py runs on two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from autosplit.pipelining import SplitPipelineStage

CASES = {
    "1F1B": "none",
    "Interleaved1F1B": "full",
    "InterleavedZeroBubble": "none",
    "ZBVZeroBubble": "none",
}
"""Schedules, and the activation checkpointing under each."""


def compared() -> dict[str, tuple[list[float | None], list[float | None], list[str]]]:
    """Losses with torch's stage and with ours, and the parameters that differ after three steps."""
    results = {}
    for schedule, checkpointing in CASES.items():
        theirs, expected = _trained(PipelineStage, schedule, checkpointing)
        ours, state = _trained(SplitPipelineStage, schedule, checkpointing)
        different = [name for name in expected if not torch.equal(state[name], expected[name])]
        results[schedule] = (
            ours,
            theirs,
            different if expected.keys() == state.keys() else ["names"],
        )
    return results


def _trained(
    stage: type[Any], schedule: str, checkpointing: str
) -> tuple[list[float | None], dict[str, Tensor]]:
    from examples import torchtitan_stages

    torchtitan_stages.use(stage)
    configuration = torchtitan_stages.configuration(schedule, checkpointing=checkpointing)
    run = torchtitan_stages.Run(configuration)
    losses = [run.step(seed) for seed in range(3)]
    return losses, {
        f"{at}.{name}": value
        for at, part in enumerate(run.parts)
        for name, value in part.state_dict().items()
    }
