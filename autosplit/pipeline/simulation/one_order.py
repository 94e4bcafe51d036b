"""All that the ranks of a step do in one order, and where each posts its receives by it."""

from __future__ import annotations

from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.routes import parcels_of, result_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds

from .playing import play, rows_of
from .step_graph import StepGraph
from .transfer import Transfer

_COMPUTED, _TRAVELS = 10.0, Transfer(latency=1.0)
"""How long an action and a message take; whole numbers, so that ranks that run them agree."""


def in_one_order(schedule: Schedule, feeds: Feeds) -> list[tuple[int, Action]]:
    """All actions of a step with their ranks, by when they start where every one takes as long:
    each behind what it needs. What a deadlock keeps from running is left out.
    """
    graph, rows = StepGraph(schedule, feeds=feeds, transfer=_TRAVELS), rows_of(schedule)
    run = play(graph, rows, [_COMPUTED * action.kind.is_compute for action in graph.actions])
    ran = [each for row, end in zip(rows, run.places, strict=True) for each in row[:end]]
    ran.sort(key=run.starts.__getitem__)
    return [(graph.ranks[each], graph.actions[each]) for each in ran]


def posts_of(schedule: Schedule, feeds: Feeds) -> list[dict[Action, tuple[int, ...]]]:
    """Per rank, for what it computes, from whom it is to have the next receives posted before it.

    A send begins where its message is made. With the receive next to it in one order of all that
    the ranks do, nothing stands in a queue behind what comes later in that order: whichever queues
    messages share, down to a single one for all, none waits for another in a circle. And by the
    time, so that a receive is posted while its message is made, not behind what its rank computes
    after that.
    """
    posts: list[dict[Action, tuple[int, ...]]] = [{} for _ in schedule.ranks]
    coming: list[list[int]] = [[] for _ in schedule.ranks]
    for maker, action in in_one_order(schedule, feeds):
        if action.kind.is_compute:
            posts[maker][action] = tuple(coming[maker])
            coming[maker].clear()
        for parcel in parcels_of(result_of(action), feeds):
            taker = schedule.placement[parcel.stage]
            if taker != maker:
                coming[taker].append(maker)
    return posts
