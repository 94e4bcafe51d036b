"""Many ways to cut played at once: only those that can be the shortest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.builders.schedule_request import ScheduleRequest
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.transfer import Transfer
from autosplit.planner.costs.block_costs import ModelCosts
from autosplit.planner.cuts import schedule_playback
from autosplit.planner.cuts.local_search import every
from autosplit.planner.cuts.schedule_playback import Order
from autosplit.planner.cuts.solve import bound
from autosplit.planner.cuts.stage_costs import PrefixSums
from tests.planner.planned import even, models, solved

FORMS = [
    ("1f1b", 4, {}),
    ("1f1b", 4, {"split_backward": False}),
    ("gpipe", 4, {"weights": "2bp"}),
    ("zb-h2", 4, {}),
    ("interleaved", 2, {"split_backward": False}),
    ("interleaved", 2, {}),
    ("zb-v", 2, {}),
    ("dualpipe-v", 2, {}),
]
LINKS = st.sampled_from([Transfer(), Transfer(0.25, 2.0)])


@settings(max_examples=60, deadline=None)
@given(st.data(), models(least=6, most=8), st.integers(4, 6), LINKS)
def test_ways_that_are_left_out_are_longer(
    data: st.DataObject, costs: ModelCosts, microbatches: int, links: Transfer
) -> None:
    name, ranks, form = data.draw(st.sampled_from(FORMS))
    order = Order(build(name, 4, microbatches, ranks=ranks, **form), links, 4.0)
    stages = PrefixSums(costs).stages(every(len(costs.blocks), 4))
    steps = order.steps(stages)
    assert (order.bounds(stages) <= steps * (1 + 1e-9)).all()
    some = torch.arange(0, len(steps), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_playback, "_TOGETHER", 2)
        found = order.least(stages, some)
    assert found.min() == steps[some].min()
    known = found.isfinite()
    assert (found[known] == steps[known]).all()
    assert not known[1::2].any()
    one = torch.tensor([int(found.argmin())])
    assert order.steps(stages.of(one)) == found.min()
    assert order.peaks(stages.of(one))[:, 0].tolist() == order.peaks(stages)[:, one[0]].tolist()


@settings(max_examples=40, deadline=None)
@given(st.data(), models(least=5, most=7), st.integers(4, 6))
def test_no_cuts_are_shorter_than_the_bound(
    data: st.DataObject, costs: ModelCosts, microbatches: int
) -> None:
    name, ranks, form = data.draw(st.sampled_from(FORMS))
    request = ScheduleRequest(name, microbatches, ranks, **form)
    found = solved(costs, 4, microbatches, name, ranks=ranks, **form)
    least = bound(costs, 4, request)
    assert 0.0 < least <= found.step * (1 + 1e-9)


def test_the_bound_by_hand() -> None:
    """Of 5, 4, 4 and 3 equal blocks the third stage begins behind 9 blocks' Fs, and ends before 9
    blocks' Bs: 9 * 3 + 8 * 4 * 3 seconds; with other cuts another stage ends later.
    """
    request = ScheduleRequest("1f1b", 8, 4, split_backward=False)
    assert bound(even(16), 4, request) == 123.0
    assert bound(even(16), 8, ScheduleRequest("zb-v", 8, 4)) == 8 * 48 / 4


def test_what_ranks_hold_is_that_of_the_schedule() -> None:
    schedule = build("zb-v", 8, 8, ranks=4)
    memory = [StageMemory(2.0 + stage, 1.0 + stage % 3) for stage in range(8)]
    costs = PrefixSums(even(8, parameters=0.0)).stages(torch.tensor([range(7)]))
    kept = torch.tensor([[[each.saved] for each in memory], [[each.deferred] for each in memory]])
    own = schedule_playback.StageCosts(
        costs.times, kept.double(), costs.parameters, costs.crossing, costs.returning
    )
    peaks = Order(schedule, Transfer(), 4.0).peaks(own)[:, 0].tolist()
    assert peaks == list(peak_memory(schedule, memory))
