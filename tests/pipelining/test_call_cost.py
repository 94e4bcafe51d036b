"""What a step costs in calls of Python functions: times would depend on the machine."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

from autosplit.pipelining import SplitPipelineStage
from autosplit.torch_internals.version import TORCH

from .programs import CPU, block, mean_square


@pytest.fixture(scope="module")
def counts() -> Iterator[dict[str, pstats.Stats]]:
    """Calls of a step of four stages on one rank, with torch's stages and with ours."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        # On one rank, torch 2.11's stages send to themselves, which Gloo does not.
        kinds = (PipelineStage, SplitPipelineStage)[TORCH < (2, 12) :]
        yield {kind.__name__: _calls(kind) for kind in kinds}
    finally:
        dist.destroy_process_group()


def _calls(kind: Any) -> pstats.Stats:
    stages = [kind(nn.Sequential(block(), block()), at, 4, CPU) for at in range(4)]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=mean_square)
    x = torch.randn(8, 4)
    for _ in range(2):
        schedule.step(x, target=x)
    with cProfile.Profile() as profile:
        schedule.step(x, target=x)
    return pstats.Stats(profile)


def _of(counts: pstats.Stats, *names: str) -> int:
    stats: dict[Any, Any] = counts.stats  # type: ignore[attr-defined]
    return sum(called for (_, _, name), (called, *_) in stats.items() if name in names)


def test_a_step_calls_fewer_functions_than_with_torchs_stages(
    counts: dict[str, pstats.Stats],
) -> None:
    if len(counts) < 2:
        pytest.skip("torch's own stage fails")
    theirs, ours = (each.total_calls for each in counts.values())  # type: ignore[attr-defined]
    assert ours < theirs


def test_a_step_does_not_walk_through_modules(counts: dict[str, pstats.Stats]) -> None:
    walks = ("named_modules", "_named_members")
    assert all(_of(counts[kind], *walks) > 0 for kind in counts if kind == "PipelineStage")
    assert _of(counts["SplitPipelineStage"], *walks) == 0


def test_a_module_is_looked_at_once_a_step(counts: dict[str, pstats.Stats]) -> None:
    assert _of(counts["SplitPipelineStage"], "_hold") == 4
