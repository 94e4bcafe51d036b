"""Timelines as pages and traces, and why a rank idled."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autosplit.errors import AutosplitError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.action import Action, ActionKind, JoinedWeights
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Span, Timeline
from autosplit.report.timeline_picture import Rows
from autosplit.report.timelines import Gap, gaps, write_chrome_trace, write_page
from tests.pipeline.training.moving import SAVED, evicting

# --- the timeline page, opened in a real browser where there is one -------------------------------


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def _timeline(split: bool = True) -> Timeline:
    return simulate(build("1f1b", 2, 3, split_backward=split), lambda action: 0.25)


def _data(path: Path) -> dict[str, object]:
    (text,) = re.findall(r"^const data = (.*);$", path.read_text(), re.MULTILINE)
    found: dict[str, object] = json.loads(text)
    return found


def test_the_page_holds_every_action_and_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page([("split", _timeline())], path)
    text = path.read_text()
    assert not re.findall(r"(?:src|href)=|@import|url\((?!#)", text)
    (panel,) = _data(path)["panels"]  # type: ignore[misc]
    assert sorted(span["text"] for span in panel["spans"]) == sorted(
        str(span.action) for span in _timeline().spans
    )
    assert panel["makespan"] == pytest.approx(1e3 * _timeline().makespan)
    waits = {gap["before"]: gap["cause"] for gap in panel["gaps"] if gap["cause"]}
    assert waits["1F0"] == "0F0"


def test_names_cannot_end_the_script(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page([("</script><b>", _timeline())], path, title="a</script>")
    assert path.read_text().count("</script>") == 1
    assert _data(path)["title"] == "a</script>"


@pytest.mark.parametrize(
    ("panels", "text"),
    [
        ([], "at least one timeline"),
        ([("empty", Timeline(2, ()))], "no rank computes in the timeline 'empty'"),
    ],
)
def test_refusals(panels: Rows, text: str, tmp_path: Path) -> None:
    with pytest.raises(AutosplitError, match=text):
        write_page(panels, tmp_path / "page.html")


def test_a_call_for_several_w_is_one_bar_of_all_its_microbatches(tmp_path: Path) -> None:
    several = JoinedWeights.of([Action.parse("0W0"), Action.parse("0W1"), Action.parse("0W2")])
    path = tmp_path / "page.html"
    write_page([("joined", Timeline(1, (Span(0, several, 0.0, 0.003),)))], path)
    (panel,) = _data(path)["panels"]  # type: ignore[misc]
    (bar,) = panel["spans"]
    assert (bar["text"], bar["microbatches"]) == ("0W0-2", [0, 1, 2])


def test_what_moves_is_below_its_rank_in_lanes_in_which_nothing_covers_another(
    tmp_path: Path,
) -> None:
    path = tmp_path / "page.html"
    schedule = evicting(build("gpipe", 2, 4), away=[SAVED])
    timeline = simulate(schedule, lambda action: 0.25 if action.kind.is_compute else 0.6)
    write_page([("evicted", timeline)], path)
    (panel,) = _data(path)["panels"]  # type: ignore[misc]
    moves = [span for span in timeline.spans if span.action.kind.is_move]
    assert sorted(each["text"] for each in panel["moves"]) == sorted(str(s.action) for s in moves)
    assert not {span["kind"] for span in panel["spans"]} & {"EVICT", "ACCEPT", "LOAD", "RETURN"}
    lanes: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for each in panel["moves"]:
        lane = lanes.setdefault((each["rank"], each["lane"]), [])
        lane.append((each["start"], each["end"], each["kind"]))
    for lane in lanes.values():
        lane.sort()
        assert all(end <= start for (_, end, _), (start, _, _) in pairwise(lane))
        assert {kind for *_, kind in lane} in ({"EVICT"}, {"LOAD"}, {"ACCEPT"}, {"RETURN"})


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_a_browser_draws_it_and_answers_the_mouse(tmp_path: Path) -> None:
    """A script at the end of the page plays the user and writes down what it saw."""
    path = tmp_path / "page.html"
    write_page([("fused", _timeline(split=False)), ("split", _timeline())], path)
    play = """<script>
      const bars = () => [...document.querySelectorAll(".bar")];
      const at = name => bars().find(bar => bar.dataset.action === name);
      const point = node => node.onmousemove(new MouseEvent("mousemove", {clientX: 50}));
      const tip = () => document.getElementById("tip").innerText;
      const seen = {bars: bars().length};
      point(at("1F0")); seen.action = tip();
      const gap = [...document.querySelectorAll(".gap")][0]; point(gap); seen.gap = tip();
      at("0F1").dispatchEvent(new MouseEvent("click", {bubbles: true}));
      seen.marked = [...document.querySelectorAll(".marked")].map(bar => bar.dataset.action);
      const faded = () => document.querySelectorAll(".faded").length;
      seen.faded = faded();
      document.querySelector("svg").onclick();
      seen.after = faded();
      const width = () => +at("0F0").getAttribute("width"), before = width();
      const wheel = new WheelEvent("wheel", {deltaY: -1, clientX: 200});
      document.querySelector("svg").dispatchEvent(wheel);
      seen.zoomed = width() > before;
      document.body.replaceChildren(JSON.stringify(seen));
    </script>"""
    path.write_text(path.read_text().replace("</html>", play + "</html>"))
    dom = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    body = dom.split("<body>")[1].split("</body>")[0].strip()
    seen = json.loads(html.unescape(body))
    fused, split = _timeline(split=False), _timeline()
    assert seen["bars"] == len(fused.spans) + len(split.spans)
    assert "waited 250 ms for 0F0 of rank 0" in seen["action"]
    assert "waited for" in seen["gap"]
    assert sorted(seen["marked"]) == [
        "0B1",
        "0F1",
        "0F1",
        "0I1",
        "0W1",
        "1B1",
        "1F1",
        "1F1",
        "1I1",
        "1W1",
    ]
    assert seen["faded"] == seen["bars"] - len(seen["marked"])
    assert seen["after"] == 0
    assert seen["zoomed"]


# --- chrome traces: slices add up, arrows start and end inside the slices that they join ----------


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
    (found,) = [
        event
        for event in phase(events, "X")
        if (event["pid"], event["tid"]) == (point["pid"], point["tid"])
        and event["ts"] < point["ts"] < event["ts"] + event["dur"]
    ]
    return found


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
    assert event["cname"] == "thread_state_running"
    assert event["pid"] == 1
    assert event["dur"] == pytest.approx(90_000)
    kinds = {e["cat"]: e["cname"] for e in phase(events, "X")}
    assert len(kinds) == len(set(kinds.values())) == 4


def test_a_call_for_several_w_names_all_its_microbatches(tmp_path: Path) -> None:
    several = JoinedWeights.of([Action.parse("0W0"), Action.parse("0W2")])
    path = tmp_path / "trace.json"
    write_chrome_trace([("joined", Timeline(1, (Span(0, several, 0.0, 0.003),)))], path)
    (event,) = phase(json.loads(path.read_text())["traceEvents"], "X")
    assert (event["name"], event["args"]) == ("0W0,2", {"stage": 0, "microbatches": [0, 2]})


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
            for process, back in ((0, "B"), (1, "I")):
                up, down = f"{lower + 1}{back}{m}", f"{lower}{back}{m}"
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
    with pytest.raises(AutosplitError, match=r"^nothing to trace: expected at least one timeline$"):
        write_chrome_trace([], tmp_path / "trace.json")


# --- what each idle gap waited for ----------------------------------------------------------------


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
