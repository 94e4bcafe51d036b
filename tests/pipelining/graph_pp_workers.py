"""What two ranks do in test_graph_pp.py: torchtitan's runner with our graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autosplit.pipelining import SplitGraphProvider

from .programs import Program, block, mean_square


def differences() -> dict[str, list[str]]:
    """What differs from plain autograd under each schedule."""
    from torchtitan.experiments.graph_trainer.graph_pp import runner, stage

    def make(part: nn.Module, at: int, count: int, device: torch.device) -> Any:
        return stage.GraphPipelineStage(part, stage_index=at, num_stages=count, device=device)

    found = {}
    for name in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        torch.manual_seed(0)
        program = Program(
            [block() for _ in range(4)],
            name,
            args=[torch.randn(8, 4)],
            target=torch.randn(8, 4),
            stage=make,
        )
        provider = SplitGraphProvider(mean_square)
        runtime = runner.register_graph_pp_schedule(program.schedule, graph_provider=provider)
        for _ in range(2):
            given: dict[str, Any] = {"target": program.target} if program.last else {}
            args = program.args if 0 in program.mine else ()
            runtime.step(*args, return_outputs=False, **given)
            program.plain_step()
        found[name] = program.differences()
        dist.barrier()
    return found
