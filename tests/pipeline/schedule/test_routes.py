"""What travels between ranks, as literal tables."""

from __future__ import annotations

import itertools

import pytest

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.schedule.routes import (
    Channel,
    Parcel,
    Routes,
    channel_of,
    parcels_of,
    routes_of,
)
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Feeds, Source, Wiring
from autosplit.pipeline.simulation.step_graph import StepGraph
from autosplit.pipeline.simulation.transfer import Transfer

SKIPS = Wiring(
    inputs=(
        (Source(None, 0),),
        (Source(0, 0), Source(0, 1)),
        (Source(0, 1), Source(1, 0)),
        (Source(0, 2), Source(0, 0), Source(2, 0)),
    ),
    outputs=(3, 1, 1),
)


def _actions(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def _texts(parcels: tuple[Parcel, ...]) -> str:
    return " ".join(map(str, parcels))


def _proven(routes: Routes) -> dict[str, int]:
    return {str(result): count for result, count in routes.proven.items()}


def test_1f1b_middle_rank() -> None:
    routes = routes_of(build("1f1b", 3, 4, split_backward=False), 1)
    assert {peer: _texts(sent) for peer, sent in routes.sends.items()} == {
        0: "1I0 1I1 1I2 1I3",
        2: "1F0 1F1 1F2 1F3",
    }
    assert {peer: _texts(came) for peer, came in routes.receives.items()} == {
        0: "0F0 0F1 0F2 0F3",
        2: "2I0 2I1 2I2 2I3",
    }
    # Rank 0 runs 0F0 0F1 0F2 0B0 0F3 ...: 0F3 can only come once 1I0 was taken.
    assert _proven(routes) == {
        "0F0": 0,
        "0F1": 0,
        "0F2": 0,
        "0F3": 1,
        "2I0": 1,
        "2I1": 2,
        "2I2": 3,
        "2I3": 4,
    }


def test_gpipe_proves_activations_only_with_gradients() -> None:
    schedule = build("gpipe", 2, 3, split_backward=False)
    assert _proven(routes_of(schedule, 0)) == {"1I0": 3, "1I1": 3, "1I2": 3}
    assert _proven(routes_of(schedule, 1)) == {"0F0": 0, "0F1": 0, "0F2": 0}


def test_stages_on_one_rank_send_nothing() -> None:
    schedule = build("1f1b", 4, 2, ranks=2)
    routes = routes_of(schedule, 0)
    assert {peer: _texts(sent) for peer, sent in routes.sends.items()} == {1: "1F0 1F1"}
    assert {peer: _texts(came) for peer, came in routes.receives.items()} == {1: "2I0 2I1"}
    alone = routes_of(build("gpipe", 3, 2, ranks=1), 0)
    assert (alone.sends, alone.receives, alone.proven) == ({}, {}, {})


def test_messages_of_several_stages_follow_the_sender() -> None:
    """Stages 0 and 3 on rank 0, 1 and 2 on rank 1: only what crosses, as rank 0 makes it."""
    schedule = Schedule(
        name="v",
        stages=4,
        microbatches=1,
        ranks=(_actions("0F0 3F0 3B0 0B0"), _actions("1F0 2F0 2B0 1B0")),
        placement=(0, 1, 1, 0),
        split_backward=False,
    )
    routes = routes_of(schedule, 1)
    assert _texts(routes.receives[0]) == "0F0 3I0"
    assert _texts(routes.sends[0]) == "2F0 1I0"
    assert _proven(routes) == {"0F0": 0, "3I0": 1}


@pytest.mark.parametrize(
    ("result", "target", "boundary"), [("0F1", 1, 0), ("1F0", 2, 1), ("2I0", 1, 1), ("1I3", 0, 0)]
)
def test_where_a_result_goes(result: str, target: int, boundary: int) -> None:
    (parcel,) = parcels_of(Action.parse(result), Feeds(3))
    assert (parcel.stage, parcel.boundary) == (target, boundary)


@pytest.mark.parametrize("result", ["2F0", "0I0", "1W0"])
def test_last_outputs_first_gradients_and_weights_go_nowhere(result: str) -> None:
    assert parcels_of(Action.parse(result), Feeds(3)) == ()


def test_a_channel_is_a_pair_of_stages() -> None:
    schedule = build("zb-v", 4, 2)

    def channel(result: str, target: int) -> Channel:
        return channel_of(Parcel(Action.parse(result), target), schedule)

    assert channel("0F1", 1) == Channel(0, 1, 0, 1)
    assert channel("3I1", 2) == Channel(3, 2, 0, 1)
    assert channel("1F0", 2).local
    assert not channel("0F1", 1).local


@pytest.mark.parametrize("rank", [0, 1])
def test_what_several_stages_of_a_rank_take_travels_with_the_first(rank: int) -> None:
    """Stages 1 and 3 share rank 1: output 0 comes with what stage 1 takes, not again for 3."""
    schedule = build("interleaved", 4, 2, ranks=2)
    routes = routes_of(schedule, rank, Feeds(4, SKIPS))
    to_first, to_last = (Parcel(Action.parse("0F1"), stage) for stage in (1, 3))
    assert routes.carried(to_first) == (0, 1)
    assert routes.carried(to_last) == (2,)
    # Gradients are added up in the order of the stages, so each travels by itself.
    assert routes.carried(Parcel(Action.parse("3I1"), 0)) == (0, 2)
    assert routes.carried(Parcel(Action.parse("1I1"), 0)) == (0, 1)


def test_stages_on_ranks_of_their_own_are_each_sent_what_they_take() -> None:
    routes = routes_of(build("1f1b", 4, 2), 0, Feeds(4, SKIPS))
    sent = [routes.carried(Parcel(Action.parse("0F1"), stage)) for stage in (1, 2, 3)]
    assert sent == [(0, 1), (1,), (0, 2)]


@pytest.mark.parametrize(
    ("name", "ranks"), [("1f1b", 4), ("interleaved", 2), ("zb-v", 2), ("chimera", 4), ("gpipe", 1)]
)
@pytest.mark.parametrize("wiring", [None, SKIPS], ids=["chain", "skips"])
def test_the_simulator_sends_what_the_engine_sends(
    name: str, ranks: int, wiring: Wiring | None
) -> None:
    schedule, feeds = build(name, 4, 4, ranks=ranks), Feeds(4, wiring)
    sent = {
        (rank, peer): list(parcels)
        for rank in range(ranks)
        for peer, parcels in routes_of(schedule, rank, feeds).sends.items()
    }
    graph = StepGraph(schedule, feeds=feeds, transfer=Transfer(latency=0.5))
    simulated: dict[tuple[int, int], list[Parcel]] = {}
    for message in itertools.chain(*graph.makes):
        if message.link is not None:
            simulated.setdefault(message.link, []).append(graph.parcels[message.parcel])
    assert simulated == sent
    assert bool(sent) == (ranks > 1)
