"""All schedules side by side."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autosplit.cli.simulate import choose_schedule, survey, survey_table
from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer


def pipeline(ranks: int) -> Costs:
    return Costs([(18.5, 18.1, 9.3)] * ranks, [StageMemory(1.0, 0.8)] * ranks)


def test_every_schedule_in_every_form() -> None:
    found, refused = survey(pipeline(4), 8)
    assert refused == {}
    assert list(survey(pipeline(3), 4)[1]) == ["dualpipe-v"]
    forms = {name: [e.weights for e in found if e.name == name] for name in SCHEDULES}
    assert forms["1f1b"] == ["fused", "2bp", "fill"]
    assert forms["interleaved"] == ["fused", "fill"]
    assert forms["zb-v"] == ["fill"]
    for entry in found:
        assert len(entry.peaks) == entry.timeline.ranks == 4
        busy = sum(entry.timeline.busy(rank) for rank in range(4))
        assert busy == pytest.approx(4 * 8 * 45.9)


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ScheduleError, match="microbatches must be an integer >= 1, got 0"):
        survey(pipeline(2), 0)
    with pytest.raises(ScheduleError, match=r"no schedule keeps the cap 0\.5; the most frugal"):
        survey(pipeline(2), 4, cap=0.5)


@pytest.mark.parametrize(
    ("costs", "counts", "message"),
    [
        (
            pipeline(4),
            {"microbatches": 10**9},
            "8 stages and 1,000,000,000 microbatches",
        ),
        (pipeline(4), {"microbatches": 8, "chunks": 10**6}, "4,000,000 stages and 8 microbatches"),
        (pipeline(64), {"microbatches": 500, "cap": math.nan}, "cap must be a number > 0"),
        (
            Costs([(0.0, 0.0, 0.0)] * 2, [StageMemory(1.0, 1.0)] * 2),
            {"microbatches": 2},
            "a step of 0 seconds of work .* give times of which one at least is > 0",
        ),
        (
            Costs([(1e308, 1e308, 1.0)] * 2, [StageMemory(1.0, 1.0)] * 2),
            {"microbatches": 2},
            "a step of inf seconds of work",
        ),
        (
            Costs([(1.0, 1.0, 1.0)] * 2, [StageMemory(1.0, 1.0)] * 2, Transfer(1e308)),
            {"microbatches": 4},
            "takes no finite time: give links that take less",
        ),
    ],
)
def test_what_would_take_for_ever_or_come_to_nothing_is_refused_first(
    costs: Costs, counts: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        survey(costs, **counts)


def _row(table: str, name: str) -> str:
    return next(line for line in table.splitlines() if line.startswith(name))


def test_rows_above_the_cap_are_marked_and_count_as_no_best() -> None:
    found = survey(pipeline(4), 8, cap=3.5)
    table = survey_table(found[0])
    assert "over cap" in _row(table, "gpipe")
    assert "over cap: keeps more on a rank" in table
    best = choose_schedule(found, None)
    assert "1.000x" in next(
        line for line in table.splitlines() if line.split()[:2] == [best.name, best.weights]
    )
    shortest = min(found[0], key=lambda entry: entry.timeline.step_time)
    assert max(shortest.peaks) > 3.5
    assert max(best.peaks) <= 3.5
    assert "over cap" not in survey_table(survey(pipeline(4), 8)[0])
