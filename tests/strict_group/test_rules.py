"""Queues that are written down: which end, which do not, and what is said of these."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from .mutations import case
from .player import Player, play

BOTH, THREE = (0, 1), (0, 1, 2)


def send(to: int, over: str = "a") -> tuple[Any, ...]:
    return "op", over, "send", (to,)


def receive(source: int, over: str = "a") -> tuple[Any, ...]:
    return "op", over, "receive", (source,)


def reduce(over: str = "a", members: tuple[int, ...] = BOTH) -> tuple[Any, ...]:
    return "op", over, "all_reduce", members


def wait(index: int, over: str = "a") -> tuple[Any, ...]:
    return "wait", over, index


EAGER = {"a": (BOTH, True), "b": (BOTH, True)}

ENDS = {
    "both at once in a group": (
        EAGER,
        [("group", "a", [("send", (1,)), ("receive", (1,))]), wait(1)],
        [("group", "a", [("send", (0,)), ("receive", (0,))]), wait(0)],
    ),
    "two communicators, enqueued in other orders": (
        EAGER,
        [reduce("a"), reduce("b"), wait(0, "b"), wait(0, "a")],
        [reduce("b"), reduce("a"), wait(0, "a"), wait(0, "b")],
    ),
    "to itself, in a group": (
        {"a": ((0,), True)},
        [("group", "a", [("send", (0,)), ("receive", (0,))])],
        [],
    ),
}

HANGS = {
    "both send first": (EAGER, [send(1), receive(1)], [send(0), receive(0)]),
    "a message that nobody takes": (EAGER, [send(1)], []),
    "made while the other waits for a message": (
        {"a": (BOTH, True), "b": (BOTH, False)},
        [send(1, "b")],
        [receive(0, "a"), wait(0, "a"), receive(0, "b")],
    ),
    "to itself": ({"a": ((0,), True)}, [receive(0), send(0)], []),
}


@pytest.mark.parametrize("case", ENDS)
def test_ends(case: str) -> None:
    communicators, *programs = ENDS[case]
    verdict = play(dict(enumerate(programs)), communicators)
    assert verdict.ends, verdict.report


@pytest.mark.parametrize("case", HANGS)
def test_hangs(case: str) -> None:
    communicators, *programs = HANGS[case]
    assert not play(dict(enumerate(programs)), communicators).ends


def test_three_ranks_in_a_circle() -> None:
    """As each sends to the next one first; one that receives first breaks it."""
    pairs = {f"{one}{other}": ((one, other), True) for one, other in ((0, 1), (1, 2), (0, 2))}
    program = {
        0: [send(1, "01"), wait(0, "01"), receive(2, "02"), wait(0, "02")],
        1: [send(2, "12"), wait(0, "12"), receive(0, "01"), wait(0, "01")],
        2: [send(0, "02"), wait(0, "02"), receive(1, "12"), wait(0, "12")],
    }
    verdict = play(program, pairs)
    assert verdict.report.splitlines()[:8] == [
        "these wait for each other, whatever the times are:",
        "  rank 0: its host  <-- waits for",
        "  rank 0: send to 1 (#0 of '01')  <-- waits for",
        "  rank 1: its host  <-- waits for",
        "  rank 1: send to 2 (#0 of '12')  <-- waits for",
        "  rank 2: its host  <-- waits for",
        "  rank 2: send to 0 (#0 of '02')  <-- waits for",
        "  rank 0: its host",
    ]
    program[2] = program[2][2:] + program[2][:2]
    assert play(program, pairs).ends


def test_a_rank_at_its_end_is_named() -> None:
    verdict = play({0: [reduce("a", THREE), wait(0)], 1: [], 2: []}, {"a": (THREE, True)})
    assert "rank 1: its host  <-- is at its end" in verdict.report


EARLY = {  # receives posted two ahead, a communicator a direction; each sends what came
    0: [receive(1, "b"), receive(1, "b"), send(1, "a"), wait(0, "b"), send(1, "a"), wait(1, "b")],
    1: [receive(0, "a"), receive(0, "a"), wait(0, "a"), send(0, "b"), wait(1, "a"), send(0, "b")],
}


def test_kernels_on_one_connection_hold_each_other_up() -> None:
    """The second receive is not launched before the first has ended, nor the send behind it."""
    assert play(EARLY, EAGER).ends
    verdict = play(EARLY, EAGER, one_connection=True)
    assert "rank 0: send to 1 (#0 of 'a')  <-- waits for" in verdict.report
    later = {rank: items[:1] + items[2:3] + items[1:2] + items[3:] for rank, items in EARLY.items()}
    later[1] = [receive(0, "a"), wait(0, "a"), send(0, "b"), receive(0, "a"), *EARLY[1][4:]]
    assert play(later, EAGER, one_connection=True).ends


@pytest.mark.parametrize("one_connection", [False, True])
def test_the_order_of_moves_decides_nothing_and_no_alarm_is_false(one_connection: bool) -> None:
    """An operation that is called stuck early is still stuck at the end."""
    result = set()
    for seed in range(120):
        program, communicators = case(seed)
        ends = play(program, communicators, one_connection=one_connection).ends
        random, player = Random(seed), Player(program, communicators, one_connection=one_connection)
        alarms: set[object] = set()
        while moves := player.moves():
            if random.random() < 0.1:
                alarms.update(player.stuck().operations)
            player.move(random.choice(moves))
        last = player.stuck()
        assert player.ended == ends == (not last.hosts and not last.operations), seed
        assert alarms <= {*last.operations}, seed
        result.add((ends, bool(alarms)))
    assert result == {(True, False), (False, True), (False, False)}
