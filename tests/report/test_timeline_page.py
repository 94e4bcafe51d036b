"""The timeline page, opened in a real browser where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from autosplit.errors import AutosplitError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.schedule.action import Action, JoinedWeights
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.timeline import Span, Timeline
from autosplit.report.timelines import Panel, write_page
from tests.pipeline.training.moving import SAVED, evicting

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
    write_page([Panel("split", _timeline())], path)
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
    write_page([Panel("</script><b>", _timeline())], path, title="a</script>")
    assert path.read_text().count("</script>") == 1
    assert _data(path)["title"] == "a</script>"


@pytest.mark.parametrize(
    ("panels", "text"),
    [
        ([], "at least one timeline"),
        ([Panel("empty", Timeline(2, ()))], "no rank computes in the timeline 'empty'"),
        ([Panel("odd", _timeline(), [[(0.0, 1.0)]])], "'odd' has 2 ranks, but memory for 1"),
    ],
)
def test_refusals(panels: list[Panel], text: str, tmp_path: Path) -> None:
    with pytest.raises(AutosplitError, match=text):
        write_page(panels, tmp_path / "page.html")


def test_a_call_for_several_w_is_one_bar_of_all_its_microbatches(tmp_path: Path) -> None:
    several = JoinedWeights.of([Action.parse("0W0"), Action.parse("0W1"), Action.parse("0W2")])
    path = tmp_path / "page.html"
    write_page([Panel("joined", Timeline(1, (Span(0, several, 0.0, 0.003),)))], path)
    (panel,) = _data(path)["panels"]  # type: ignore[misc]
    (bar,) = panel["spans"]
    assert (bar["text"], bar["microbatches"]) == ("0W0-2", [0, 1, 2])


def test_what_moves_is_below_its_rank_in_lanes_in_which_nothing_covers_another(
    tmp_path: Path,
) -> None:
    path = tmp_path / "page.html"
    schedule = evicting(build("gpipe", 2, 4), away=[SAVED])
    timeline = simulate(schedule, lambda action: 0.25 if action.kind.is_compute else 0.6)
    write_page([Panel("evicted", timeline)], path)
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
    memory = [[(0.0, 1024.0), (0.5, 4096.0)], [(0.25, 2048.0)]]
    write_page([Panel("fused", _timeline(split=False)), Panel("split", _timeline(), memory)], path)
    play = """<script>
      const bars = () => [...document.querySelectorAll(".bar")];
      const at = name => bars().find(bar => bar.dataset.action === name);
      const point = node => node.onmousemove(new MouseEvent("mousemove", {clientX: 50}));
      const tip = () => document.getElementById("tip").innerText;
      const seen = {bars: bars().length, memory: document.querySelectorAll(".memory").length};
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
    assert seen["memory"] == 2
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
