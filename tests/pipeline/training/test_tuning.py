"""What the first steps under ``schedule="auto"`` measure, and what follows from it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds, Source, Wiring
from autosplit.pipeline.search.search import search
from autosplit.pipeline.simulation.simulate import Costs, simulate
from autosplit.pipeline.training import tuning
from autosplit.pipeline.training.rank_memory import RankMemory
from autosplit.pipeline.training.tuning import MEASURED, Tuner, first_schedule


class OneProcess:
    """All that a tuner asks of its groups, where one process has run all ranks."""

    @property
    def everybody(self) -> OneProcess:
        return self

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Puts:
    """All that a tuner asks of a stage: here, 8 bytes with a gradient and 8 without."""

    output_specs = ((torch.Size([2]), torch.float32, True), (torch.Size([1]), torch.int64, False))


def tuned(wiring: Wiring | None = None) -> Schedule:
    """What a tuner finds where F, I and W take a second each."""
    groups, size = cast("Groups", OneProcess()), cast("RankMemory", None)
    first = first_schedule(2, 4, 2)
    tuner = Tuner(first, groups, Feeds(2, wiring), size, None)
    spans = simulate(first, lambda action: 1.0).spans
    stages: Any = {0: Puts(), 1: Puts()}
    for _ in range(MEASURED):
        assert tuner.after_step(spans, stages) is None
    found = tuner.after_step(spans, stages)
    assert found is not None
    return found


def kinds(schedule: Schedule) -> set[str]:
    return {action.kind.value for row in schedule.ranks for action in row}


def test_what_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Costs] = []

    def noted(costs: Costs, *args: Any, **options: Any) -> Schedule:
        asked.append(costs)
        return search(costs, *args, **options)

    monkeypatch.setattr(tuning, "search", noted)
    wiring = Wiring(((Source(None, 0),), (Source(0, 1), Source(0, 0))), (2,))
    assert kinds(tuned()) == kinds(tuned(wiring)) == set("FIW")
    assert [costs.wiring for costs in asked] == [None, wiring]
    assert [[*costs.times] for costs in asked] == [[(1.0, 1.0, 1.0)] * 2] * 2
