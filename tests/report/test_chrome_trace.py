"""Timelines as traces: slices add up, arrows start and end inside the slices that they join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autosplit
from autosplit.chrome_trace import write_chrome_trace
from autosplit.errors import AutosplitError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.ledger.bands import Band, StepMemory
from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation.simulate import Span, Timeline, simulate

Event = dict[str, Any]


def seconds(action: Action) -> float:
    return {"F": 0.10, "I": 0.11, "W": 0.09, "B": 0.20}[action.kind.value]


def shifted(timeline: Timeline, by: float) -> Timeline:
    return Timeline(
        timeline.ranks,
        tuple(Span(s.rank, s.action, s.start + by, s.end + by) for s in timeline.spans),
    )


FUSED = simulate(build("1f1b", 3, 4, split_backward=False), seconds, transfer=0.001)
SPLIT = shifted(simulate(build("1f1b", 3, 4), seconds, transfer=0.001), 7.25)


@pytest.fixture
def events(tmp_path: Path) -> list[Event]:
    path = tmp_path / "trace.json"
    write_chrome_trace([("fused", FUSED), ("split", SPLIT)], path)
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    loaded: list[Event] = trace["traceEvents"]
    return loaded


def phase(events: list[Event], letter: str) -> list[Event]:
    return [event for event in events if event["ph"] == letter]


def slice_around(events: list[Event], point: Event) -> Event:
    """The one slice that a point of an arrow lies inside of, edges not counted."""
    (result,) = [
        event
        for event in phase(events, "X")
        if (event["pid"], event["tid"]) == (point["pid"], point["tid"])
        and event["ts"] < point["ts"] < event["ts"] + event["dur"]
    ]
    return result


def test_processes_are_timelines_and_threads_are_ranks(events: list[Event]) -> None:
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in phase(events, "M")
        if "name" in event["args"]
    }
    assert names == {
        ("process_name", 0, 0): "fused",
        ("process_name", 1, 0): "split",
        **{("thread_name", p, r): f"rank {r}" for p in (0, 1) for r in (0, 1, 2)},
    }
    labels = [e["args"]["labels"] for e in phase(events, "M") if e["name"] == "process_labels"]
    assert labels == [
        f"{1e3 * item.step_time:.3g} ms, bubble {item.bubble_ratio():.1%}"
        for item in (FUSED, SPLIT)
    ]
    order = [event for event in phase(events, "M") if "sort_index" in event["args"]]
    assert [event["args"]["sort_index"] for event in order] == [0, 0, 1, 2, 1, 0, 1, 2]


@pytest.mark.parametrize(("process", "timeline"), [(0, FUSED), (1, SPLIT)])
def test_slices_add_up_to_the_timeline(
    events: list[Event], process: int, timeline: Timeline
) -> None:
    slices = [event for event in phase(events, "X") if event["pid"] == process]
    assert len(slices) == len(timeline.spans)
    for rank in range(timeline.ranks):
        total = sum(event["dur"] for event in slices if event["tid"] == rank)
        assert total == pytest.approx(1e6 * timeline.busy(rank), abs=0.01)
    assert min(event["ts"] for event in slices) == 0
    last = max(event["ts"] + event["dur"] for event in slices)
    assert last == pytest.approx(1e6 * timeline.makespan, abs=0.01)


def test_a_slice_says_what_it_is(events: list[Event]) -> None:
    (event,) = [e for e in phase(events, "X") if e["name"] == "1W2"]
    assert event["cat"] == "backward_weight"
    assert event["args"] == {"stage": 1, "microbatch": 2}
    assert event["pid"] == 1
    assert event["dur"] == pytest.approx(90_000)


def test_arrows_join_producers_and_consumers(events: list[Event]) -> None:
    starts = {event["id"]: event for event in phase(events, "s")}
    ends = {event["id"]: event for event in phase(events, "f")}
    assert len(starts) == len(phase(events, "s"))
    assert starts.keys() == ends.keys()
    joined = set()
    for number, start in starts.items():
        end = ends[number]
        assert type(number) is int
        assert end["bp"] == "e"
        assert (start["name"], start["cat"], start["pid"]) == (end["name"], end["cat"], end["pid"])
        assert start["ts"] < end["ts"]
        maker, user = slice_around(events, start), slice_around(events, end)
        joined.add((start["pid"], start["name"], maker["name"], user["name"]))
    expected = set()
    for m in range(4):
        for lower in (0, 1):
            for process, returned in ((0, "B"), (1, "I")):
                up, down = f"{lower + 1}{returned}{m}", f"{lower}{returned}{m}"
                expected.add((process, "activation", f"{lower}F{m}", f"{lower + 1}F{m}"))
                expected.add((process, "gradient", up, down))
    assert joined == expected


def test_stages_on_one_rank_need_no_arrow(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    merged = simulate(build("1f1b", 4, 1, ranks=2), seconds)
    write_chrome_trace([("merged", merged)], path)
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["name"] for event in phase(events, "s")] == ["activation", "gradient"]


def test_no_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        AutosplitError, match=r"^nothing to trace: expected at least one timeline\nMore: "
    ):
        write_chrome_trace([], tmp_path / "trace.json")


def test_memory_is_a_track_a_rank(tmp_path: Path) -> None:
    kept = {"fixed": 3, "activations": 5}
    memory = StepMemory.of([([Band(7.5, 8.0, "0F0", **kept)], None)] * 3)
    path = tmp_path / "trace.json"
    autosplit.write_timeline(SPLIT, path, memory=memory)
    tracks = phase(json.loads(path.read_text())["traceEvents"], "C")
    assert [event["name"] for event in tracks] == [f"rank {rank}: bytes" for rank in range(3)]
    assert [(event["ts"], event["args"]) for event in tracks] == [(250_000.0, kept)] * 3
    with pytest.raises(
        AutosplitError, match=r"traces show memory, pictures do not: give .* the suffix \.json"
    ):
        autosplit.write_timeline(SPLIT, tmp_path / "trace.png", memory=memory)
