"""The forwards of a step by themselves."""

from __future__ import annotations

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.evaluation import forward_only
from autosplit.pipeline.simulation.simulate import simulate


def _rows(name: str, stages: int, microbatches: int, ranks: int) -> list[str]:
    schedule = forward_only(build(name, stages, 1, ranks=ranks), microbatches)
    return [" ".join(map(str, row)) for row in schedule.ranks]


def test_one_stage_a_rank() -> None:
    assert _rows("1f1b", 2, 3, 2) == ["0F0 0F1 0F2", "1F0 1F1 1F2"]


def test_stages_apart_do_not_wait_for_each_other() -> None:
    """0F1 does not stand behind 3F0, which needs the whole pipeline first."""
    assert _rows("zb-v", 4, 2, 2) == ["0F0 0F1 3F0 3F1", "1F0 1F1 2F0 2F1"]
    schedule = forward_only(build("zb-v", 8, 4, ranks=4), 4)
    # Rank 3 holds stages 3 and 4: it starts after 3, runs 8, and 3 more follow.
    assert simulate(schedule, lambda action: 1.0).makespan == 14.0
