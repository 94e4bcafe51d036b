"""Adjacent I and W as one B."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.builders.fusing import fuse_adjacent
from autosplit.pipeline.schedule.wiring import Source, Wiring
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs, simulate
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.pipeline.validation.validate import validate
from tests.pipeline.tables import rows_of, schedule_of, seconds, small

SPLIT = schedule_of("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")


def test_all_pairs() -> None:
    assert rows_of(fuse_adjacent(SPLIT)) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_only_pairs_of_one_microbatch_and_stage() -> None:
    apart = schedule_of("0F0 0I0 0F1 0W0 0I1 1F0 1I0 1W0 0W1 1F1 1I1 1W1", placement=(0, 0))
    assert rows_of(fuse_adjacent(apart)) == ["0F0 0I0 0F1 0W0 0I1 1F0 1B0 0W1 1F1 1B1"]


def alike(stages: int, *times: float) -> Costs:
    forward, inputs, weights = times
    memory = [StageMemory(1.0, 1.0)] * stages
    return Costs([(forward, inputs, weights)] * stages, memory)


def test_nobody_waits_longer() -> None:
    """Rank 0 waits for 1I0 and 1I1, and nobody for its own Is."""
    fused = fuse_adjacent(SPLIT, alike(2, 1, 1, 1))
    assert rows_of(fused) == ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    assert simulate(fuse_adjacent(SPLIT), seconds(1, 1, 1)).makespan == 9
    assert simulate(fused, seconds(1, 1, 1)).makespan == 8


def test_a_whole_backward_takes_its_own_time() -> None:
    """1I0 is waited for one second after it ends: enough for a B of 3, not for one of I and W.

    Nobody waits for stage 0's, but a B longer than both would hold up its own rank.
    """
    costs = replace(alike(2, 2, 2, 2), times=[(4.0, 2.0, 2.0), (1.0, 2.0, 2.0)])
    halves = ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    whole = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1"]
    assert rows_of(fuse_adjacent(SPLIT, costs)) == [whole[0], halves[1]]
    short = replace(costs, full=[4.0, 3.0])
    assert rows_of(fuse_adjacent(SPLIT, short)) == whole
    long = replace(costs, full=[6.0, 3.0])
    assert rows_of(fuse_adjacent(SPLIT, long)) == [halves[0], whole[1]]


def test_the_gradient_of_a_skip_connection_is_waited_for_as_well() -> None:
    """Stage 0 waits for 2I0; with stage 1 on its own rank, nobody else does."""
    rows = ("0F0 1F0 1I0 0I0 1W0 0W0", "2F0 2I0 2W0")
    schedule = schedule_of(*rows, stages=3, microbatches=1, placement=(0, 0, 1))
    skips = ((Source(None, 0),), (Source(0, 0),), (Source(0, 0),))
    alone = replace(alike(3, 1, 1, 1), wiring=Wiring(skips, (1, 1)))
    assert "2B0" not in rows_of(fuse_adjacent(schedule, alone))[1]
    longer = replace(alone, times=[(1.0, 1.0, 1.0), (1.0, 4.0, 1.0), (1.0, 1.0, 1.0)])
    assert "2B0" in rows_of(fuse_adjacent(schedule, longer))[1]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5]),
)
def test_every_schedule_stays_legal_and_as_short(
    name: str, ranks: int, microbatches: int, latency: float
) -> None:
    schedule = small(name, ranks, microbatches)
    validate(fuse_adjacent(schedule))
    costs = alike(schedule.stages, 3.0, 2.0, 1.0)
    costs = replace(costs, transfer=Transfer(latency))
    fused = fuse_adjacent(schedule, costs)
    validate(fused)
    before, after = (costs.timeline(each).makespan for each in (schedule, fused))
    assert after == pytest.approx(before)
