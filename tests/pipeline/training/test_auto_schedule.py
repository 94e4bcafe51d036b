"""What the first steps under ``schedule="auto"`` measure, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch

from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Source, Wiring
from autosplit.pipeline.search.search import search
from autosplit.pipeline.simulation.simulate import Costs, simulate
from autosplit.pipeline.simulation.timeline import Span
from autosplit.pipeline.simulation.transfer import MoveCosts, Transfer
from autosplit.pipeline.training import auto_schedule
from autosplit.pipeline.training.auto_schedule import MEASURED, Tuner, first_schedule, with_whole
from autosplit.pipeline.validation.validate import validate
from tests.pipeline.tables import rows_of


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


def tuned(
    whole: float,
    parts: int = 1,
    link: Transfer | None = None,
    beside: Sequence[Span] = (),
    **options: Any,
) -> Schedule:
    """What a tuner finds where F, I and W take a second each and a B ``whole`` seconds."""
    tuner = Tuner(
        first_schedule(2, 4, 2),
        cast("Groups", OneProcess()),
        links=lambda: link or Transfer(),
        **options,
    )
    seconds = dict.fromkeys(ActionKind, 1.0) | {ActionKind.BACKWARD: whole}
    timeline = simulate(tuner.measured, lambda action: seconds[action.kind])
    spans = [part for span in timeline.spans for part in cut(span, parts)] + [*beside]
    stages: Any = {0: Puts(), 1: Puts()}
    for _ in range(MEASURED):
        assert tuner.after_step(spans, stages) is None
    found = tuner.after_step(spans, stages)
    assert found is not None
    return found


def cut(span: Span, parts: int) -> Iterator[Span]:
    """A W as its slices, one after another."""
    if span.action.kind is not ActionKind.BACKWARD_WEIGHT:
        parts = 1
    took = (span.end - span.start) / parts
    for part in range(parts):
        start = span.start + part * took
        yield Span(span.rank, span.action, start, start + took)


def kinds(schedule: Schedule) -> set[str]:
    return {action.kind.value for row in schedule.ranks for action in row}


def test_the_last_backward_of_each_stage_is_whole() -> None:
    """The other Ws of the stage run before it, in the order that they had."""
    schedule = first_schedule(2, 3, 2)
    assert rows_of(schedule) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert rows_of(with_whole(schedule)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0B2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1W1 1B2",
    ]
    assert with_whole(first_schedule(2, 1, 2)) == first_schedule(2, 1, 2)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_every_first_schedule_stays_legal_and_adds_up_in_the_same_order(
    chunks: int, microbatches: int
) -> None:
    schedule = with_whole(first_schedule(4 * chunks, microbatches, 4))
    validate(schedule)
    for stage, rank in enumerate(schedule.placement):
        mine = [a for a in schedule.ranks[rank] if a.stage == stage and a.kind.value in "WB"]
        assert [action.microbatch for action in mine] == list(range(microbatches))
        assert [a.kind.value for a in mine] == ["W"] * (microbatches - 1) + ["B"]


def test_a_b_that_is_measured_short_is_used_where_others_wait_for_its_gradient() -> None:
    assert kinds(tuned(whole=1.0)) == set("FB")
    assert kinds(tuned(whole=2.0)) > set("FIW")


def test_slices_of_a_w_count_as_one() -> None:
    assert tuned(whole=1.75, parts=4) == tuned(whole=1.75)


def test_the_link_and_what_goes_over_it_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those of the outputs; only the first has a gradient that comes back."""
    asked: list[Costs] = []

    def noted(costs: Costs, *args: Any, **options: Any) -> Schedule:
        asked.append(costs)
        return search(costs, *args, **options)

    monkeypatch.setattr(auto_schedule, "search", noted)
    wiring = Wiring(((Source(None, 0),), (Source(0, 1), Source(0, 0))), (2,))
    link = Transfer(latency=0.25, bandwidth=8.0)
    tuned(2.0, parts=2, link=link, wiring=wiring)
    tuned(2.0, parts=2)
    costs, plain = asked
    assert costs.transfer == Transfer(
        0.25, 8.0, {0: [8.0, 8.0], 1: [8.0, 8.0]}, {0: [8.0, 0.0], 1: [8.0, 0.0]}
    )
    assert (costs.wiring, plain.wiring) == (wiring, None)


def test_what_copies_took_of_measured_actions_is_not_in_their_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in the simulated moves, which may stand elsewhere."""
    asked: list[Costs] = []

    def noted(costs: Costs, *args: Any, **options: Any) -> Schedule:
        asked.append(costs)
        return search(costs, *args, **options)

    monkeypatch.setattr(auto_schedule, "search", noted)
    copies = [Span(0, Action.parse("0OFFLOAD0"), 0.0, 100.0)]
    tuned(2.0, link=Transfer(moves=MoveCosts(slowing=1.0)), beside=copies)
    assert asked[0].times == [(0.5, 0.5, 0.5), (1.0, 1.0, 1.0)]
