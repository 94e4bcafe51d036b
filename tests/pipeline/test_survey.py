"""All schedules side by side."""

from __future__ import annotations

import pytest

from autosplit.errors import ScheduleError
from autosplit.pipeline.memory import StageMemory
from autosplit.pipeline.schedules import SCHEDULES
from autosplit.pipeline.survey import Pipeline, survey
from autosplit.pipeline.transfer import Transfer
from autosplit.report.survey import pareto_front


def pipeline(ranks: int) -> Pipeline:
    return Pipeline(((18.5, 18.1, 9.3),) * ranks, (StageMemory(1.0, 0.8),) * ranks, Transfer())


def test_every_schedule_in_every_form() -> None:
    found = survey(pipeline(4), 8)
    assert found.refused == {}
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
    with pytest.raises(ScheduleError, match="chunks >= 2, got 2, 2 and 1"):
        survey(pipeline(2), 2, chunks=1)
