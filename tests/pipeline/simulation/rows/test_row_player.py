"""Rows that are played without a graph take as long, and hold as much, as simulated ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.search.row_changes import changes_for
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.counted_costs import CountedCosts
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.simulation.transfer import MoveCosts, Transfer

MEASURES = ("balance", "offload", "recompute")
LINKS = (
    Transfer(0.0, 8.0, host=Link(0.0, 4.0)),
    Transfer(0.25, 4.0, message_bytes=2.0, host=Link(0.125, 8.0), pairs={(0, 1): Link(0.5, 2.0)}),
    Transfer(),
    Transfer(0.0, 8.0, host=Link(0.0, 4.0), moves=MoveCosts(0.25, 0.5, 0.75, 0.125)),
)


@pytest.mark.parametrize("seed", range(8))
def test_the_same_steps(seed: int) -> None:
    chance = random.Random(seed)
    ranks = 2 + seed % 2
    stages = 2 * ranks if seed == 4 else ranks
    costs = Costs(
        [(float(chance.randint(1, 4)), 3.0, 2.0) for _ in range(stages)],
        [StageMemory(8.0, float(chance.choice((4, 10))), 1.0, tensors=4) for _ in range(stages)],
        LINKS[seed % 4],
    )
    schedule = build("interleaved" if seed == 4 else "zb-h1", stages, 4, ranks=ranks)
    schedule = replace(schedule, moved={0: 4} if seed % 2 else {})
    counted, changes = CountedCosts.of(costs), changes_for(MEASURES, costs)
    moved = 0
    for _ in range(300):
        played = counted.rows_played(schedule)
        assert played is not None
        changed = chance.choice(changes)(schedule, played.starts, chance)
        if changed is None:
            continue
        moved += bool(journeys_of(changed))
        found = counted.rows_played(changed)
        try:
            timeline = costs.timeline(changed)
        except ScheduleError:
            assert found is None
            continue
        assert found is not None
        assert found.makespan == pytest.approx(timeline.makespan)
        assert found.peaks == pytest.approx(peak_memory(changed, costs.memory))
        for span in timeline.spans:
            if span.action.kind.is_compute:
                assert found.starts[span.action] == pytest.approx(span.start)
        if sum(map(len, changed.ranks)) < 40 * ranks:
            schedule = changed
    assert moved > 50
