"""Changes that bring an F forward and move what is too much because of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.search.relief import early, relief
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.counted_costs import CountedCosts
from autosplit.pipeline.simulation.step_costs import Costs
from autosplit.pipeline.validation.validate import validate

COSTS = CountedCosts.of(Costs([(2.0, 3.0, 2.0)] * 2, [StageMemory(6.0, 3.0, 1.0)] * 2))
CAPS = (13.0, 13.0)
MEASURES = {"offload": ActionKind.OFFLOAD, "recompute": ActionKind.RECOMPUTE}


def _fitting(measure: str) -> Iterator[Schedule]:
    """What the change comes to within the caps."""
    change, start = relief((measure,), COSTS, CAPS), build("1f1b", 2, 4)
    assert max(peak_memory(start, COSTS.memory)) <= max(CAPS)
    for seed in range(40):
        changed = change(start, {}, random.Random(seed))
        if changed is not None and max(peak_memory(changed, COSTS.memory)) <= max(CAPS):
            validate(changed)
            yield changed


def _turns_of_fs(row: Sequence[Action]) -> list[int]:
    computed = [action.kind for action in row if action.kind.is_compute]
    return [turn for turn, kind in enumerate(computed) if kind is ActionKind.FORWARD]


@pytest.mark.parametrize("measure", MEASURES)
def test_an_f_comes_forward_together_with_what_makes_room_for_it(measure: str) -> None:
    rows = [schedule.ranks[0] for schedule in _fitting(measure)]
    taken = [row for row in rows if any(each.kind is MEASURES[measure] for each in row)]
    assert taken
    start = _turns_of_fs(build("1f1b", 2, 4).ranks[0])
    assert all(_turns_of_fs(row) < start for row in taken)


def test_all_fs_first() -> None:
    found = early(build("1f1b", 2, 4), tuple(MEASURES), COSTS, CAPS)
    validate(found)
    assert max(peak_memory(found, COSTS.memory)) <= max(CAPS)
    for row in found.ranks:
        computed = [action.kind.value for action in row if action.kind.is_compute]
        assert computed[:4] == ["F"] * 4
