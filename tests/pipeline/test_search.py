"""The search: as good as an exact solver on small cases, never worse than a named schedule."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tables import rows_of, seconds, small

from autosplit.errors import ScheduleError
from autosplit.pipeline.costs import Costs
from autosplit.pipeline.memory import StageMemory, peak_memory
from autosplit.pipeline.schedules import SCHEDULES, build
from autosplit.pipeline.search import search
from autosplit.pipeline.search.improve import improve
from autosplit.pipeline.search.problem import Problem
from autosplit.pipeline.simulate import simulate
from autosplit.pipeline.transfer import Transfer
from autosplit.pipeline.validate import validate

TIMES = st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(1, 4))


def alike(stages: int, times: tuple[float, float, float], transfer: float = 0.0) -> Costs:
    return Costs([times] * stages, [StageMemory(1.0, 1.0)] * stages, Transfer(transfer))


def makespan(problem: Problem, rows: list[list[int]]) -> float:
    played = problem.play(rows)
    assert played is not None
    return played[0]


def shortest(problem: Problem) -> float:
    """The optimum, by branch and bound over every order of one stage a rank."""
    ranks, count = len(problem.caps), problem.microbatches
    best = math.inf
    work = [sum(problem.costs.times[stage]) * count for stage in range(ranks)]

    def visit(
        done: tuple[tuple[int, ...], ...],
        clocks: tuple[float, ...],
        left: tuple[float, ...],
        ready: dict[int, float],
    ) -> None:
        nonlocal best
        if max(clock + rest for clock, rest in zip(clocks, left, strict=True)) >= best:
            return
        if not any(left):
            best = max(clocks)
            return
        options = []
        for rank in range(ranks):
            forwards, inputs, weights = done[rank]
            open_kinds = [
                kind
                for kind, allowed in enumerate(
                    (
                        forwards < count and forwards - weights < problem.caps[rank],
                        inputs < forwards,
                        weights < inputs,
                    )
                )
                if allowed
            ]
            for kind in open_kinds:
                action = (rank * 4 + kind) * count + done[rank][kind]
                need = problem.needs[action]
                if need >= 0 and need not in ready:
                    continue
                start = max(clocks[rank], ready.get(need, 0.0))
                options.append((start, rank, kind, action))
        if not options:
            return
        # Some rank goes first in time: of all orders of moves one in order of starts is enough.
        horizon = min(start + problem.seconds[action] for start, _, _, action in options)
        for start, rank, kind, action in sorted(options):
            if start > horizon:
                break
            end = start + problem.seconds[action]
            counts = tuple(n + (k == kind) for k, n in enumerate(done[rank]))
            target = problem.target[action]
            arrival = end + (problem.costs.transfer.latency if target >= 0 else 0.0)
            visit(
                (*done[:rank], counts, *done[rank + 1 :]),
                (*clocks[:rank], end, *clocks[rank + 1 :]),
                (*left[:rank], left[rank] - problem.seconds[action], *left[rank + 1 :]),
                {**ready, action: arrival},
            )

    visit(((0, 0, 0),) * ranks, (0.0,) * ranks, tuple(work), {})
    return best


@pytest.mark.parametrize(
    ("times", "cap"),
    [
        ([(1, 1, 1), (1, 1, 1)], 2),
        ([(3, 3, 2), (3, 3, 2)], 2),
        ([(2, 0, 3), (2, 2, 1)], 2),
        ([(1, 2, 3), (3, 1, 1)], 3),
        ([(2, 1, 1), (1, 3, 2)], 1),
    ],
)
def test_as_short_as_the_shortest(times: list[tuple[int, int, int]], cap: int) -> None:
    costs = Costs([tuple(map(float, each)) for each in times], [StageMemory(1.0, 1.0)] * 2)
    problem = Problem(costs, (0, 1), 3, (cap, cap))
    found = search(costs, 3, cap=float(cap))
    assert simulate(found, costs.seconds).makespan == shortest(problem)


@settings(deadline=None, max_examples=10)
@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.sampled_from([0.0, 0.5]))
def test_never_worse_than_a_named_schedule(
    data: st.DataObject, ranks: int, microbatches: int, latency: float
) -> None:
    times = data.draw(st.lists(TIMES, min_size=2 * ranks, max_size=2 * ranks))
    cap = data.draw(st.sampled_from([2.0 * ranks, 3.0 * ranks, math.inf]))
    memory = [StageMemory(1.0, 0.75)] * (2 * ranks)
    costs = Costs([tuple(map(float, each)) for each in times], memory, Transfer(latency))
    found = search(costs, microbatches, ranks=ranks, cap=cap)
    validate(found)
    assert max(peak_memory(found, memory)) <= cap
    step = simulate(found, costs.seconds, transfer=costs.transfer).makespan
    for name in set(SCHEDULES) - {"dualpipe-v", "dualpipe", "chimera"}:
        named = build(name, 2 * ranks, microbatches, ranks=ranks)
        if max(peak_memory(named, memory)) <= cap:
            other = simulate(named, costs.seconds, transfer=costs.transfer).makespan
            assert step <= other * (1 + 1e-9), name


def test_more_memory_than_1f1b_and_less_than_zb_h2() -> None:
    """Between two named schedules there is room for one that nobody wrote down."""
    costs = alike(4, (18.5, 18.1, 9.3))
    steps = [
        simulate(search(costs, 8, cap=cap), costs.seconds).makespan for cap in (4.0, 5.0, 6.0, 7.0)
    ]
    assert steps == sorted(steps, reverse=True)
    one_f_one_b = simulate(build("zb-h1", 4, 8), seconds(18.5, 18.1, 9.3)).makespan
    assert steps[0] == pytest.approx(one_f_one_b)
    assert steps[2] < 0.97 * one_f_one_b


def test_a_full_backward_where_it_keeps_less() -> None:
    """What I leaves is more than what it found: room for it only where W follows in one piece."""
    memory = [StageMemory(1.0, 1.5)] * 2
    costs = Costs([(3.0, 2.0, 1.0)] * 2, memory)
    found = search(costs, 4, cap=2.0)
    assert "0B0" in rows_of(found)[0]
    assert max(peak_memory(found, memory)) <= 2.0
    fused = build("1f1b", 2, 4, split_backward=False)
    assert simulate(found, costs.seconds).makespan <= simulate(fused, costs.seconds).makespan


def test_a_full_backward_where_it_is_shorter() -> None:
    costs = Costs([(2.0, 2.0, 2.0)], [StageMemory(1.0, 1.0)], full=[3.0])
    found = search(costs, 3)
    assert simulate(found, costs.seconds).makespan == 3 * (2.0 + 3.0)
    with pytest.raises(ScheduleError, match="seconds of a B of each of 1 stages, got 2"):
        Costs([(1.0, 1.0, 1.0)], [StageMemory(1.0, 1.0)], full=[1.0, 2.0])
    assert costs.cut(2).full == [1.5, 1.5]


def test_the_same_every_time() -> None:
    costs = alike(3, (3.0, 2.0, 2.0), transfer=0.5)
    assert rows_of(search(costs, 5, cap=4.0)) == rows_of(search(costs, 5, cap=4.0))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.data())
def test_plays_as_the_simulator_does(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    schedule = small(name, ranks, microbatches)
    assume(schedule.mirror is None)
    stages = schedule.stages
    times = data.draw(st.lists(TIMES, min_size=stages, max_size=stages))
    transfer = Transfer(latency=0.5, bandwidth=2.0, message_bytes=3.0)
    costs = Costs(
        [tuple(map(float, each)) for each in times], [StageMemory(1.0, 1.0)] * stages, transfer
    )
    problem = Problem(costs, schedule.placement, microbatches, (math.inf,) * ranks)
    rows = problem.rows_of(schedule)
    schedule = problem.schedule(name, rows)  # each B as I and W
    timeline = simulate(schedule, costs.seconds, transfer=transfer)
    played = problem.play(rows)
    assert played is not None
    assert played[0] == pytest.approx(timeline.makespan)
    starts = {problem.number[span.action]: span.start for span in timeline.spans}
    assert played[1] == pytest.approx([starts.get(n, -1.0) for n in range(len(problem.actions))])


def test_local_search_moves_a_weight_off_the_critical_path() -> None:
    costs = alike(2, (1.0, 1.0, 1.0))
    problem = Problem(costs, (0, 1), 2, (2.0, 2.0))
    schedule = build("1f1b", 2, 2, split_backward=False)
    rows = problem.rows_of(schedule)
    assert makespan(problem, rows) == 8.0
    found = improve(problem, rows, plays=50)
    assert found is not None
    assert found.makespan == 7.0


def test_orders_that_cannot_run() -> None:
    costs = alike(2, (1.0, 1.0, 1.0))
    problem = Problem(costs, (0, 1), 2, (2.0, 2.0))
    rows = problem.rows_of(build("1f1b", 2, 2))
    rows[1] = [rows[1][0], *rows[1][2:4], rows[1][1], *rows[1][4:]]
    blocked = [rows[0][:1] + rows[0][2:3] + rows[0][1:2] + rows[0][3:], rows[1]]
    assert problem.play(blocked) is None
    assert improve(problem, blocked, plays=5) is None


def test_bad_arguments_are_refused() -> None:
    costs = alike(2, (1.0, 1.0, 1.0))
    with pytest.raises(ScheduleError, match=r"no schedule found within the cap 0\.5; the most"):
        search(costs, 2, cap=0.5)
    with pytest.raises(ScheduleError, match="cap must be a number > 0, or one for each of 2"):
        search(costs, 2, cap=[1.0])
    with pytest.raises(ScheduleError, match="2 stages cannot fill 3 ranks"):
        search(costs, 2, ranks=3)
    with pytest.raises(ScheduleError, match="microbatches must be an integer >= 1, got 0"):
        search(costs, 0)
    with pytest.raises(ScheduleError, match="expected times and memory of each stage, got 1"):
        Costs([(1.0, 1.0, 1.0)], [])
