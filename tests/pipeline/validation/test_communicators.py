"""Programs that end under NCCL's rules, and reasons why others hang."""

from __future__ import annotations

import graphlib
import random
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from autosplit.errors import ScheduleError
from autosplit.mesh.dimensions import REPLICATE, SHARD, TENSOR
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.pipeline.validation import communicators
from autosplit.pipeline.validation.communicators import (
    COMPUTE,
    Programs,
    Sharing,
    find_deadlock,
)
from autosplit.pipeline.validation.programs import engine_programs, torch_programs
from autosplit.pipeline.validation.torch_csv import add_communication
from tests.pipeline.schedule.random_schedules import random_schedule
from tests.pipeline.validation.programs import held_up, of_items, on_mesh
from tests.pipeline.validation.reported import CASES, DEFERS
from tests.trainer.moving import awaiting, evicting, offloading

SHARINGS: tuple[Sharing, ...] = ("streams", "launches", "kernels")
MESH = {REPLICATE: 2, SHARD: 2, TENSOR: 2}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_our_schedules_end_whatever_queues_share(name: str) -> None:
    for ranks, microbatches in ((2, 4), (4, 8)):
        schedule = build(name, ranks * (SCHEDULES[name].chunks or 2), microbatches, ranks=ranks)
        for dimensions in ((), (*MESH,)):
            programs = engine_programs(schedule, dimensions)
            assert [find_deadlock(programs, item) for item in SHARINGS] == [None] * 3
            assert not any(map(held_up, programs.values()))
        assert (
            find_deadlock(torch_programs(add_communication(schedule), schedule.placement)) is None
        )


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_they_take_as_long_as_where_each_message_starts_at_once(name: str) -> None:
    """No receive is posted behind what its rank computes while the message is made."""
    second = 1.0
    link = Transfer(bandwidth=3.0, message_bytes=1.0)
    for ranks, microbatches in ((4, 8), (8, 16)):
        schedule = build(name, ranks * (SCHEDULES[name].chunks or 2), microbatches, ranks=ranks)
        expected = simulate(schedule, lambda action: second, transfer=link).makespan
        assert _seconds(engine_programs(schedule), second, 1.0 / 3.0) == pytest.approx(expected)


def _seconds(programs: Programs, computed: float, message: float) -> float:
    """How long a step takes, if each thing computed and each message takes so long."""
    graph: dict[Any, Any] = {}
    took: dict[Any, float] = {}
    for rank, program in programs.items():
        communicators._add_rank(graph, rank, program, "streams")
        for place, operation in enumerate(program):
            took[rank, place, "ends"] = computed * (COMPUTE in operation.queues)
    for meeting, parts in communicators._meetings(programs).items():
        graph[meeting] = [(*place, "starts") for place, _ in parts]
        took[meeting] = message * parts[0][1].is_message
        for place, _ in parts:
            graph[*place, "ends"].append(meeting)
    ends: dict[Any, float] = {}
    for item in graphlib.TopologicalSorter(graph).static_order():
        ends[item] = max((ends[need] for need in graph[item]), default=0.0) + took.get(item, 0.0)
    return max(ends.values())


def test_so_do_schedules_that_nobody_would_write() -> None:
    for seed in range(40):
        programs = engine_programs(random_schedule(seed))
        assert [find_deadlock(programs, item) for item in SHARINGS] == [None] * 3, seed


@pytest.mark.parametrize("seed", range(12))
def test_one_pipeline_stands_for_the_mesh(seed: int) -> None:
    """Also where two operations of a rank have changed places, and much hangs."""
    chance = random.Random(seed)
    name = ["1f1b", "zb-v", "dualpipe-v", "interleaved"][seed % 4]
    programs = engine_programs(build(name, 4, 4, ranks=2), (*MESH,))
    if seed >= 4:
        rank = chance.randrange(2)
        row = list(programs[rank])
        posts = [at for at, item in enumerate(row) if item.parts and item.queues[0] != COMPUTE]
        one, other = chance.sample(posts, 2)
        row[one], row[other] = (
            row[other]._replace(after=row[one].after),
            row[one]._replace(after=row[other].after),
        )
        programs = {**programs, rank: row}
    for sharing in SHARINGS:
        whole = find_deadlock(on_mesh(programs, MESH), sharing)
        assert (find_deadlock(programs, sharing) is None) == (whole is None)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-v"])
def test_moves_end(name: str) -> None:
    schedule = build(name, 4 * (SCHEDULES[name].chunks or 2), 8, ranks=4)
    evicted = evicting(schedule, range(4))
    for moved in (offloading(schedule), evicted, awaiting(evicted)):
        assert find_deadlock(engine_programs(moved)) is None


def test_reductions_that_a_file_of_torch_lists_are_judged() -> None:
    listed = rows("0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD", "1RECV_F0 1F0 1B0 1SEND_B0")
    programs = torch_programs(listed, (0, 1), "edge", (SHARD, TENSOR))
    parts = {program.text: [part.communicator for part in program.parts] for program in programs[0]}
    assert parts["0UNSHARD"] == ["dp_shard gathers of rank 0"]
    assert parts["0F0"] == ["tp of rank 0"]
    assert parts["0REDUCE_GRAD"] == ["dp_shard of rank 0"]


# --- what hangs, and how it is said ---------------------------------------------------------------


def rows(*texts: str) -> list[list[Action]]:
    return [[*map(Action.parse, text.split())] for text in texts]


IN_TURN = (0, 1, 0, 1)
"""Of two ranks, those that hold four stages."""


CROSSED = rows("0F1 0SEND_F1 0RECV_B0 0B0", "1B0 1SEND_B0 1RECV_F1 1F1")
CIRCLE = """\
1. rank 0: 0SEND_F1 <-- waits for 1RECV_F1 of rank 1
2. rank 1: 1RECV_F1 <-- waits for 1SEND_B0
3. rank 1: 1SEND_B0 <-- waits for 0RECV_B0 of rank 0
4. rank 0: 0RECV_B0 <-- waits for 0SEND_F1
slot    0    1         2         3    4
rank 0  0F1  0SEND_F1  0RECV_B0  0B0  settled
             ^1        ^4                      <-- waits for 1RECV_F1 of rank 1
rank 1  1B0  1SEND_B0  1RECV_F1  1F1  settled
             ^3        ^2                      <-- waits for 0RECV_B0 of rank 0"""


def test_a_circle_is_drawn() -> None:
    result = find_deadlock(torch_programs(CROSSED, IN_TURN))
    assert str(result) == CIRCLE
    assert find_deadlock(torch_programs(CROSSED, IN_TURN, "edge")) is None


def test_messages_that_cross_on_one_communicator_are_refused() -> None:
    """NCCL would give each receive the other's message."""
    crossing = rows("0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1")
    with pytest.raises(ScheduleError, match="rank 0 sends 0SEND_F0 where rank 1 receives 1RECV_F1"):
        torch_programs(crossing, IN_TURN)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (("send", (1,)), None, "0 <-- waits for rank 1, which never enqueues the counterpart"),
        (("sum", (0, 1)), None, "rank 1, which never enqueues sum"),
        (("sum", (0, 1)), ("gather", (0, 1)), "sum of rank 1, which enqueues gather"),
    ],
)
def test_an_operation_without_a_partner_is_named(first: Any, second: Any, said: str) -> None:
    program = {0: [("op", "0", *first)], 1: [("op", "0", *second)] if second else []}
    assert said in str(find_deadlock(of_items(program, {"0": ((0, 1), True)})))


def test_receives_posted_ahead_hang_where_queues_share_a_connection() -> None:
    """The second cannot be launched before the first ends, nor what comes behind it: why the
    engine posts each where all ranks have it in one order.
    """
    ahead = rows(
        "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    )
    results = [
        find_deadlock(torch_programs(ahead, IN_TURN, "edge"), item) is None for item in SHARINGS
    ]
    assert results == [True, False, False]
    one_order = engine_programs(build("1f1b", 2, 2))
    assert [find_deadlock(one_order, item) for item in SHARINGS] == [None] * 3


# --- what people report, and the mends ------------------------------------------------------------


@pytest.mark.parametrize("thread", sorted(CASES))
def test_reported(thread: str) -> None:
    program, communicators, ends = CASES[thread]
    assert (find_deadlock(of_items(program, communicators)) is None) is ends


def test_early_receives_hold_sends_up() -> None:
    """pytorch #188833, which ends, but late."""
    listed = add_communication(build("interleaved", 4, 8, ranks=2))
    results = [
        sum(map(held_up, torch_programs(listed, IN_TURN, item).values()))
        for item in ("pair", "edge")
    ]
    assert results == [41, 0]


@pytest.mark.skipif(not DEFERS, reason="before torch 2.13 all are batched")
def test_torch_batches_mixed_messages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """So those of one direction have communicators of two ranks."""
    calls: list[str] = []
    for name in ("isend", "irecv"):
        alone = mock.Mock(side_effect=lambda *_, what=name, **__: calls.append(what))
        monkeypatch.setattr(dist, name, alone)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: calls.append("batch"))
    group = mock.Mock(group_name="pp")
    send, receive = (mock.Mock(op=op, group=group) for op in (dist.isend, dist.irecv))
    for ops in ([send], [receive], [send, receive]):
        schedules._batch_p2p(ops)
    assert calls == ["isend", "irecv", "batch"]
