"""What local search changes at a schedule: legal, and played as it is simulated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autosplit.errors import ScheduleError
from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.moves import journeys_of
from autosplit.pipeline.search.changes import changes_for, early
from autosplit.pipeline.search.problem import Problem
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import MoveCosts, Transfer
from autosplit.pipeline.validation.validate import validate

MEASURES = ("balance", "offload", "recompute")
LINKS = (
    Transfer(0.0, 8.0, host=Link(0.0, 4.0)),
    Transfer(0.25, 4.0, message_bytes=2.0, host=Link(0.125, 8.0), pairs={(0, 1): Link(0.5, 2.0)}),
    Transfer(),
    Transfer(0.0, 8.0, host=Link(0.0, 4.0), moves=MoveCosts(0.25, 0.5, 0.75, 0.125)),
)


@pytest.mark.parametrize("seed", range(8))
def test_changed_schedules_are_played_as_they_are_simulated(seed: int) -> None:
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
    problem = Problem(costs, schedule.placement, 4, (20.0,) * ranks)
    changes = changes_for(MEASURES, problem)
    moved = 0
    for _ in range(300):
        played = problem.play(schedule)
        assert played is not None
        changed = chance.choice(changes)(played, chance)
        if changed is None:
            continue
        moved += bool(journeys_of(changed))
        found = problem.play(changed)
        try:
            timeline = costs.timeline(changed)
        except ScheduleError:
            assert found is None
            continue
        assert found is not None
        assert found.makespan == pytest.approx(timeline.makespan)
        peaks = peak_memory(changed, costs.memory)
        assert problem.over(changed) == pytest.approx(sum(max(0.0, p / 20.0 - 1) for p in peaks))
        for span in timeline.spans:
            assert found.start(span.action) in (-1.0, pytest.approx(span.start))
        if sum(map(len, changed.ranks)) < 40 * ranks:
            schedule = changed
    validate(schedule)
    assert moved > 50


def _turns_of_fs(row: Sequence[Action]) -> list[int]:
    computed = [action.kind for action in row if action.kind.is_compute]
    return [turn for turn, kind in enumerate(computed) if kind is ActionKind.FORWARD]


@pytest.mark.parametrize("measure", ["offload", "recompute"])
def test_an_f_comes_forward_together_with_what_makes_room_for_it(measure: str) -> None:
    memory = [StageMemory(6.0, 3.0, 1.0)] * 2
    problem = Problem(Costs([(2.0, 3.0, 2.0)] * 2, memory), (0, 1), 4, (13.0, 13.0))
    start = build("1f1b", 2, 4)
    played = problem.play(start)
    assert played is not None
    assert not problem.over(start)
    relief = changes_for((measure,), problem)
    found = [
        changed
        for change in relief
        for seed in range(40)
        if (changed := change(played, random.Random(seed))) is not None
        and not problem.over(changed)
        and any(each.kind.name == measure.upper() for each in changed.ranks[0])
    ]
    assert any(_turns_of_fs(each.ranks[0]) < _turns_of_fs(start.ranks[0]) for each in found)
    for each in found:
        validate(each)


def test_all_fs_first() -> None:
    memory = [StageMemory(6.0, 3.0, 1.0)] * 2
    problem = Problem(Costs([(2.0, 3.0, 2.0)] * 2, memory), (0, 1), 4, (13.0, 13.0))
    played = problem.play(build("1f1b", 2, 4))
    assert played is not None
    found = early(("offload", "recompute"), played)
    validate(found)
    assert not problem.over(found)
    for row in found.ranks:
        assert _turns_of_fs(row) == [0, 1, 2, 3]
