"""Drawn timelines: every action is a bar in its place, idle is stated, panels share a scale."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autosplit.errors import AutosplitError
from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation.simulate import Span, Timeline
from autosplit.report import draw_timelines, timeline_figure, write_timeline

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle


def timeline(ranks: int, *spans: str, start: float = 5.0) -> Timeline:
    """Spans written "RANK ACTION FROM TO" in milliseconds, on a clock that starts at 5 s."""
    parsed = []
    for text in spans:
        rank, action, begin, end = text.split()
        times = (start + float(begin) / 1e3, start + float(end) / 1e3)
        parsed.append(Span(int(rank), Action.parse(action), *times))
    return Timeline(ranks, tuple(parsed))


FUSED = timeline(
    2, "0 0F0 0 100", "1 1F0 100 200", "1 1B0 200 400", "0 0SEND_F0 100 101", "0 0B0 400 600"
)
SPLIT = timeline(
    2,
    "0 0F0 0 100",
    "1 1F0 100 200",
    "1 1I0 200 300",
    "0 0I0 300 400",
    "1 1W0 300 400",
    "0 0W0 400 500",
)


def bars(axes: Axes) -> dict[str, Rectangle]:
    return {str(patch.get_gid()): patch for patch in axes.patches if isinstance(patch, Rectangle)}


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def headings(axes: Axes) -> list[str]:
    return [axes.get_title("left"), axes.get_title("right")]


def test_every_compute_action_is_a_bar_at_its_time_and_rank() -> None:
    axes = timeline_figure([("split", SPLIT)]).axes[0]
    placed = {
        name: (round(bar.get_x(), 6), round(bar.get_width(), 6), round(bar.get_y() + 0.41, 6))
        for name, bar in bars(axes).items()
    }
    assert placed == {
        "0/0/idle": (0, 500, 0),
        "0/1/idle": (0, 500, 1),
        "0/0/0F0": (0, 100, 0),
        "0/1/1F0": (100, 100, 1),
        "0/1/1I0": (200, 100, 1),
        "0/0/0I0": (300, 100, 0),
        "0/1/1W0": (300, 100, 1),
        "0/0/0W0": (400, 100, 0),
    }


def test_audits_are_hatched_and_framed_with_their_action(tmp_path: Path) -> None:
    audits = timeline(2, "1 1F0 450 550", "0 0F0 610 650").spans
    audited = replace(FUSED, audits=audits)
    figure = timeline_figure([("", audited)], marked=[Action.parse("1F0")])
    (axes,) = figure.axes
    hatched = {name for name, bar in bars(axes).items() if bar.get_hatch() == "xxxx"}
    assert hatched == {"0/1/1F0/again", "0/0/0F0/again"}
    framed = {name for name, bar in bars(axes).items() if bar.get_linewidth() == 2.5}
    assert framed == {"0/1/1F0", "0/1/1F0/again"}
    assert axes.get_xlim() == pytest.approx((0.0, 650.0))  # one runs after the step's last action
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[-1] == "runs again: an audit"
    assert audited.busy(1) == FUSED.busy(1)
    write_timeline(audited, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    again = [(event["name"], event["tid"]) for event in events if event.get("cat") == "audit"]
    assert again == [("1F0 again", 1), ("0F0 again", 0)]


def test_a_ranks_later_stage_is_lighter() -> None:
    spans = "0 0F0 0 100", "1 1F0 100 200", "1 2F0 200 300", "0 3F0 300 400"
    figure = timeline_figure([("v", timeline(2, *spans))])
    fills = {name: bar.get_facecolor() for name, bar in bars(figure.axes[0]).items()}
    assert fills["0/0/0F0"] == fills["0/1/1F0"] != fills["0/0/3F0"] == fills["0/1/2F0"]
    assert sum(fills["0/0/0F0"]) < sum(fills["0/0/3F0"])
    legends = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legends == ["F  forward", "lighter: a rank's later stages", "idle"]


def test_panels_share_the_time_axis_and_say_makespan_and_bubble() -> None:
    fused, split = timeline_figure([("fused", FUSED), ("split", SPLIT)]).axes
    assert fused.get_xlim() == split.get_xlim()
    assert split.get_xlim()[1] == pytest.approx(600.0)
    assert headings(fused) == ["fused", "makespan 600 ms    bubble 50.0%"]
    assert headings(split) == ["split", "makespan 500 ms    bubble 40.0%"]
    assert (fused.get_xlabel(), split.get_xlabel()) == ("", "milliseconds")
    fused.figure.canvas.draw()
    assert fused.bbox.width == pytest.approx(split.bbox.width)
    assert fused.bbox.y0 > split.bbox.y1


def test_steps_that_overlap_are_idle_within_their_own_time_only() -> None:
    spans = timeline(2, "0 0F0 0 100", "0 0B0 100 400", "1 1F0 100 200", "1 1B0 200 500").spans
    axes = timeline_figure([("zb-h2", Timeline(2, spans, crosses_step=True))]).axes[0]
    assert headings(axes)[1] == "makespan 500 ms    steps overlap, one every 400 ms    bubble 0.0%"
    idle = [bars(axes)[f"0/{rank}/idle"] for rank in (0, 1)]
    assert [round(item.get_x()) for item in idle] == [0, 100]
    assert [round(item.get_width()) for item in idle] == [400, 400]


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")]
)
def test_the_suffix_names_the_format(tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"both{suffix}"
    draw_timelines([("fused", FUSED), ("split", SPLIT)], path, title="two stages")
    assert path.read_bytes().startswith(start)


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AutosplitError) as error:
        draw_timelines([("split", SPLIT)], "timeline.jpg")
    assert str(error.value) == (
        "cannot draw timelines into 'timeline.jpg': expected a name that ends in .pdf, .png, .svg"
    )


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(
        AutosplitError, match=r"^nothing to draw: expected at least one timeline\nMore: "
    ):
        timeline_figure([])
    only_sends = timeline(1, "0 0SEND_F0 0 10")
    for empty in (Timeline(2, ()), only_sends):
        with pytest.raises(AutosplitError) as error:
            timeline_figure([("split", SPLIT), ("bare", empty)])
        assert str(error.value) == "nothing to draw: no rank computes in the timeline 'bare'"


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AutosplitError, match=r"run: pip install autosplit\[plot\]\nMore: "):
        timeline_figure([("split", SPLIT)])
