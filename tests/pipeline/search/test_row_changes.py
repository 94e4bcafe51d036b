"""Changes of rows that the search within a limit makes."""

from __future__ import annotations

import random

import pytest

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.search.row_changes import held, sent


@pytest.mark.parametrize("seed", range(20))
def test_who_evicts_waits_once_also_for_what_comes_back_at_once(seed: int) -> None:
    schedule, chance = build("1f1b", 2, 4), random.Random(seed)
    row = schedule.ranks[0]
    made, used = chance.choice([each for each in held(row) if each[1] > each[0] + 1])
    place = chance.randint(made + 1, used)
    changed = sent(schedule, {}, chance, (0, place, place, row[used]), waits=True)
    assert changed is not None
    moves = [action.kind for action in changed.ranks[0] if action.kind.is_memory]
    assert moves == [ActionKind.EVICT, ActionKind.AWAIT, ActionKind.LOAD]
