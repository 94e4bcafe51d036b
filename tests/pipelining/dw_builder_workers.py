"""What two ranks do in test_dw_builder.py: split modules in torch's own stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

import autosplit
from autosplit.pipelining import dw_builder
from autosplit.torch_internals.version import TORCH
from tests.autograd.pipelining_workers import V_SHAPED

from .programs import Program, block

STAGES = {
    "ScheduleGPipe": 2,
    "Schedule1F1B": 2,
    "ScheduleInterleaved1F1B": 4,
    "ScheduleLoopedBFS": 4,
    "ScheduleInterleavedZeroBubble": 4,
    "ScheduleZBVZeroBubble": 4,
    "ScheduleDualPipeV": 4,
}
if TORCH < (2, 12):  # of any modules: Gloo is asked to send shapes from a rank to itself
    STAGES = {name: at for name, at in STAGES.items() if name not in V_SHAPED}
SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def _stage(told: bool) -> Any:
    def make(part: nn.Module, at: int, count: int, device: torch.device) -> PipelineStage:
        module = autosplit.split(part)
        options: dict[str, Any] = {"dw_builder": dw_builder(module)} if told else {}
        return PipelineStage(module, at, count, device, **options)

    return make


def differences(told: bool) -> dict[str, list[str]]:
    """What differs from plain autograd after two steps, of which the second one counts."""
    found = {}
    for at, (name, count) in enumerate(STAGES.items()):
        if name in SPLIT and not told:
            continue
        scaled = (at % 2 == 0) is told
        torch.manual_seed(0)
        program = Program(
            [block() for _ in range(count)],
            name,
            args=[torch.randn(8, 4)],
            target=torch.randn(8, 4),
            schedule_options={"scale_grads": scaled},
            reverse=name == "ScheduleLoopedBFS",
            stage=_stage(told),
        )
        for _ in range(2):
            for part in [*program.parts, *program.plain]:
                part.zero_grad()
            program.step()
            program.plain_step()
        found[f"{name}, scaled {scaled}"] = program.differences()
        dist.barrier()
    return found


def both() -> list[dict[str, list[str]]]:
    return [differences(True), differences(False)]
