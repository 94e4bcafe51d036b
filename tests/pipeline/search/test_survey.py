"""All schedules side by side."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autosplit.cli.simulate import choose_schedule
from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES
from autosplit.pipeline.search.survey import survey
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.report.schedule_table import pareto_front, survey_table


def pipeline(ranks: int) -> Costs:
    return Costs([(18.5, 18.1, 9.3)] * ranks, [StageMemory(1.0, 0.8)] * ranks)


def test_every_schedule_in_every_form() -> None:
    found = survey(pipeline(4), 8)
    assert found.refused == {}
    assert list(survey(pipeline(3), 4).refused) == ["dualpipe-v", "dualpipe", "chimera"]
    forms = {name: [e.weights for e in found.entries if e.name == name] for name in SCHEDULES}
    assert forms["1f1b"] == ["fused", "2bp", "fill"]
    assert forms["interleaved"] == ["fused", "fill"]
    assert forms["zb-v"] == ["fill"]
    for entry in found.entries:
        assert len(entry.peaks) == entry.timeline.ranks == 4
        busy = sum(entry.timeline.busy(rank) for rank in range(4))
        assert busy == pytest.approx(4 * 8 * 45.9)


def test_what_a_pipeline_does_not_beat_is_on_the_front() -> None:
    entries = survey(pipeline(4), 8).entries
    front = pareto_front(entries)
    for one in front:
        assert not any(
            other.timeline.step_time <= one.timeline.step_time and max(other.peaks) < max(one.peaks)
            for other in entries
        )
    assert max(front[0].peaks) > max(front[-1].peaks)


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ScheduleError, match="microbatches must be an integer >= 1, got 0"):
        survey(pipeline(2), 0)
    with pytest.raises(ScheduleError, match="chunks must be at least 2, got 1"):
        survey(pipeline(2), 2, chunks=1)


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


def test_auto_keeps_the_cap_and_is_never_worse() -> None:
    found = survey(pipeline(2), 4, cap=2.0)
    auto = found.entries[-1]
    assert auto.name == "auto"
    assert max(auto.peaks) <= 2.0
    single = [entry for entry in found.entries if entry.schedule.mirror is None]
    within = [entry.timeline.makespan for entry in single if max(entry.peaks) <= 2.0]
    assert auto.timeline.step_time == min(within)
    with pytest.raises(ScheduleError, match=r"no schedule found within the cap 0\.5"):
        survey(pipeline(2), 4, cap=0.5)


def _row(table: str, name: str) -> str:
    return next(line for line in table.splitlines() if line.startswith(name))


def test_rows_above_the_cap_are_marked_and_count_as_no_best() -> None:
    found = survey(pipeline(4), 8, cap=3.5)
    table = survey_table(found)
    assert "over cap" in _row(table, "gpipe")
    assert "over cap" not in _row(table, "auto")
    assert "over cap: keeps more than 3.5 on a rank" in table
    best = choose_schedule(found, None)
    assert "1.000x" in next(
        line for line in table.splitlines() if line.split()[:2] == [best.name, best.weights]
    )
    shortest = min(found.entries, key=lambda entry: entry.timeline.step_time)
    assert max(shortest.peaks) > 3.5
    assert max(best.peaks) <= 3.5
    assert "over cap" not in survey_table(survey(pipeline(4), 8))
