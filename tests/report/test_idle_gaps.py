"""What each idle gap waited for."""

from __future__ import annotations

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Span, Timeline
from autosplit.report.timelines import Gap, gaps


def _text(gap: Gap) -> str:
    after = "end" if gap.after is None else str(gap.after.action)
    cause = "nothing" if gap.cause is None else f"{gap.cause.action} of rank {gap.cause.rank}"
    return f"rank {gap.rank} {gap.start:g}-{gap.end:g} {after} waits for {cause}"


def test_every_gap_of_fused_1f1b_has_its_cause() -> None:
    """F takes 1, B takes 2: 0F0 0F1 . . 0B0 . 0B1 over 1F0 1B0 1F1 1B1."""
    schedule = build("1f1b", 2, 2, split_backward=False)
    seconds = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}
    timeline = simulate(schedule, lambda action: seconds[action.kind])
    assert [_text(gap) for gap in gaps(timeline)] == [
        "rank 0 2-4 0B0 waits for 1B0 of rank 1",
        "rank 0 6-7 0B1 waits for 1B1 of rank 1",
        "rank 1 0-1 1F0 waits for 0F0 of rank 0",
        "rank 1 7-9 end waits for nothing",
    ]


def test_the_last_need_is_the_cause_and_own_results_are_none() -> None:
    spans = [
        Span(0, Action.parse("0F0"), 0.0, 1.0),
        Span(0, Action.parse("0B0"), 2.0, 3.0),
    ]
    assert [_text(gap) for gap in gaps(Timeline(1, tuple(spans)))] == [
        "rank 0 1-2 0B0 waits for nothing"
    ]


def test_what_other_steps_fill_is_no_gap() -> None:
    spans = [
        Span(0, Action.parse("0F0"), 0.0, 1.0),
        Span(0, Action.parse("0B0"), 3.0, 5.0),
        Span(1, Action.parse("1F0"), 1.0, 2.0),
        Span(1, Action.parse("1B0"), 2.0, 5.0),
    ]
    assert [_text(gap) for gap in gaps(Timeline(2, tuple(spans), crosses_step=True))] == [
        "rank 0 1-3 0B0 waits for 1B0 of rank 1",
        "rank 1 5-6 end waits for nothing",
    ]


def test_no_spans_no_gaps() -> None:
    assert list(gaps(Timeline(2, ()))) == []
