from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, WEIGHTS, build
from autosplit.pipeline.builders.placement import WeightPlacer
from autosplit.pipeline.schedule.schedule import ActionKind, Schedule
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.validation.validate import validate
from tests.pipeline.tables import rows_of, schedule_of, seconds

FUSED: dict[str, Any] = {"split_backward": False}
PAPER: dict[str, Any] = {"weights": "2bp"}
FILL: dict[str, Any] = {"weights": "fill"}
NAMES = st.sampled_from(list(SCHEDULES))
LINEAR = st.sampled_from(["naive", "gpipe", "1f1b"])

TABLES: list[tuple[str, int, int, dict[str, Any], list[str]]] = [
    ("naive", 2, 2, PAPER, ["0F0 0I0 0F1 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]),
    ("naive", 2, 2, FILL, ["0F0 0I0 0F1 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]),
    ("gpipe", 2, 2, FUSED, ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]),
    (
        "1f1b",
        3,
        4,
        PAPER,
        [
            "0F0 0F1 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3",
            "1F0 1F1 1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3",
            "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3",
        ],
    ),
    (
        "1f1b",
        3,
        4,
        FILL,
        [
            "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
            "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
            "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
        ],
    ),
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "options", "expected"), TABLES)
def test_tables(
    name: str, stages: int, microbatches: int, options: dict[str, Any], expected: list[str]
) -> None:
    schedule = build(name, stages, microbatches, **options)
    assert rows_of(schedule) == expected
    assert (schedule.name, schedule.stages, schedule.microbatches) == (name, stages, microbatches)
    assert schedule.placement == tuple(range(stages))
    assert schedule.split_backward is options.get("split_backward", True)


def test_a_block_of_stages_runs_as_one() -> None:
    schedule = build("1f1b", 5, 2, ranks=2, weights="2bp")
    assert schedule.placement == (0, 0, 0, 1, 1)
    assert rows_of(schedule) == [
        "0F0 1F0 2F0 0F1 1F1 2F1 2I0 1I0 0I0 2W0 1W0 0W0 2I1 1I1 0I1 2W1 1W1 0W1",
        "3F0 4F0 4I0 3I0 3F1 4F1 4I1 3I1 4W0 3W0 4W1 3W1",
    ]


def admitted(name: str) -> list[dict[str, Any]]:
    """The options that the schedule admits."""
    family = SCHEDULES[name]
    placements = [{"weights": weights} for weights in family.weights] or [{}]
    return [*placements, *([FUSED] if family.fused else [])]


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    name = draw(NAMES)
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    chunks = SCHEDULES[name].chunks or draw(st.integers(2, 4))
    stages = ranks * chunks
    if SCHEDULES[name].chunks:
        stages += draw(st.integers(0, 5))
    options = draw(st.sampled_from(admitted(name)))
    try:
        return build(name, stages, microbatches, ranks=ranks, **options)
    except ScheduleError:
        assert name == "dualpipe-v"  # the only one that does not admit all counts
        reject()


@settings(deadline=None, max_examples=60)
@given(any_schedule())
def test_every_built_schedule_is_legal(schedule: Schedule) -> None:
    """And its gradients are added in the order of a plain loop over microbatches."""
    validate(schedule)
    for row in schedule.ranks:
        for stage, kind in {(action.stage, action.kind) for action in row}:
            order = [a.microbatch for a in row if (a.stage, a.kind) == (stage, kind)]
            assert order == sorted(order)
    assert set(schedule.placement) == set(range(len(schedule.ranks)))
    if schedule.name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2"):
        assert list(schedule.placement) == sorted(schedule.placement)


@settings(deadline=None, max_examples=60)
@given(LINEAR, st.integers(1, 6), st.integers(1, 10))
def test_filling_leaves_no_gap_while_a_weight_waits(
    name: str, stages: int, microbatches: int
) -> None:
    schedule = build(name, stages, microbatches, weights="fill")
    free_at, pending = [0.0] * stages, [0] * stages
    for span in simulate(schedule, seconds(1, 1, 1)).spans:
        assert span.start == free_at[span.rank] or not pending[span.rank], span
        free_at[span.rank] = span.end
        pending[span.rank] += {"F": 0, "I": 1, "W": -1}[span.action.kind.value]


def test_times_move_weights_into_the_gaps_of_uneven_stages() -> None:
    times = [(1, 1, 2), (2, 2, 2), (1, 1, 1)]
    plain, suited = build("1f1b", 3, 2), build("1f1b", 3, 2, times=times)
    durations = {
        (stage, kind): float(seconds)
        for stage, triple in enumerate(times)
        for kind, seconds in zip(
            (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT),
            triple,
            strict=True,
        )
    }
    assert rows_of(plain)[1] == "1F0 1F1 1I0 1W0 1I1 1W1"
    assert rows_of(suited)[1] == "1F0 1F1 1I0 1I1 1W0 1W1"
    assert simulate(plain, durations).makespan == 14.0
    assert simulate(suited, durations).makespan == 13.0


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_counts_must_be_positive_integers(name: str) -> None:
    for bad in (0, -1, 1.0, "2", True, None):
        value: Any = bad
        with pytest.raises(
            ScheduleError, match=f"microbatches must be an integer >= 1, got {bad!r}"
        ):
            build(name, 2, value)
        with pytest.raises(ScheduleError, match=f"stages must be an integer >= 1, got {bad!r}"):
            build(name, value, 2)
        if bad is not None:
            with pytest.raises(ScheduleError, match=f"ranks must be an integer >= 1, got {bad!r}"):
                build(name, 2, 2, ranks=value)


def refusal(**options: Any) -> str:
    arguments: dict[str, Any] = {"name": "1f1b", "stages": 2, "microbatches": 2, **options}
    with pytest.raises(ScheduleError) as caught:
        build(**arguments)
    return str(caught.value)


def test_unknown_names_list_the_known_ones() -> None:
    assert (
        refusal(name="zbv")
        == f"unknown schedule 'zbv'; known: {', '.join(SCHEDULES)}; did you mean 'zb-v'?"
    )
    assert list(SCHEDULES)[:3] == ["naive", "gpipe", "1f1b"]
    assert refusal(weights="late") == "unknown weights 'late'; known: 2bp, fill"
    assert WEIGHTS == ("2bp", "fill")


def test_more_ranks_than_stages() -> None:
    assert refusal(ranks=3) == (
        "2 stages cannot fill 3 ranks: each rank needs at least one stage in '1f1b'; cut the "
        "model into at least 3 stages, or use fewer ranks"
    )
    for name in ("interleaved", "zb-v"):
        assert refusal(name=name, stages=5, ranks=3) == (
            f"5 stages cannot fill 3 ranks: each rank needs at least 2 stages in {name!r}; cut "
            "the model into at least 6 stages, or use fewer ranks"
        )
    assert refusal(name="zb-v", stages=1) == (
        "1 stages cannot fill 1 ranks: each rank needs at least 2 stages in 'zb-v'; cut the "
        "model into at least 2 stages, or use fewer ranks"
    )


def test_interleaved_stages_are_dealt_out_evenly() -> None:
    assert refusal(name="interleaved", stages=5, ranks=2) == (
        "'interleaved' assigns stages to ranks round-robin: expected a multiple of 2 stages for 2 "
        "ranks, got 5"
    )
    assert build("interleaved", 9, 3, ranks=3).placement == (0, 1, 2) * 3


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "v-min"])
def test_schedules_that_exist_only_split(name: str) -> None:
    assert refusal(name=name, stages=4, split_backward=False) == (
        f"{name!r} exists only with a split backward: leave split_backward=False out, or use one "
        "of 'naive', 'gpipe', '1f1b', 'interleaved'"
    )
    assert refusal(name=name, stages=4, weights="2bp") == (
        f"{name!r} has no weights='2bp'; known: 'fill'"
    )


def test_options_without_an_effect_are_refused() -> None:
    assert refusal(split_backward=False, weights="2bp") == (
        "weights='2bp' has no meaning with split_backward=False, where no W exists: leave weights "
        "out or split the backward"
    )
    assert "times=(1, 1, 1) has no meaning with split_backward=False" in refusal(
        split_backward=False, times=(1, 1, 1)
    )
    assert refusal(weights="2bp", times=(1, 1, 1)) == (
        "times has no meaning with weights='2bp', a fixed placement: leave times out or use "
        "weights='fill'"
    )


@pytest.mark.parametrize(
    "times",
    [(), (1, 1), (1, 1, -1), (1, 1, float("nan")), (1, 1, "2"), [(1, 1, 1)], [(1, 1), (1, 1)], 5],
)
def test_bad_times_are_refused(times: Any) -> None:
    assert refusal(times=times) == (
        "times must be (F, I, W), or one such triple for each of the 2 stages, all finite and "
        f">= 0; got {times!r}"
    )


def test_an_order_that_deadlocks_cannot_be_filled() -> None:
    stuck = schedule_of("0F0 0I0 0F1 0I1", "1F0 1F1 1I0 1I1")
    with pytest.raises(ScheduleError) as caught:
        WeightPlacer(stuck, 2).fill([(1.0, 1.0, 1.0)] * 2)
    assert str(caught.value) == (
        "no place for the backward weights within 2 microbatches in flight: nothing can run while "
        "0I0, 1F1 wait. Change the order of these actions, or allow more microbatches in flight"
    )
