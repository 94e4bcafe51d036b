"""Bands of memory, drawn and on the timeline page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autosplit.errors import AutosplitError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.ledger.bands import OWNERS, Band, StepMemory, owners_of
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.report.memory_picture import COLOURS, draw_memory, memory_figure
from autosplit.report.timeline_page import Panel, write_page

MIB = 2**20


def band(start: float, end: float, during: str = "", **held: int) -> Band:
    return Band(start, end, during, dict.fromkeys(OWNERS, 0) | held)


MEMORY = StepMemory.of(
    [
        ([band(5.0, 5.0, parameters=MIB), band(5.0, 5.5, "0F0", parameters=MIB, saved=MIB)], MIB),
        ([band(5.0, 5.0, parameters=MIB), band(5.5, 6.0, "1F0", parameters=MIB, working=3)], None),
    ]
)


def test_every_owner_has_a_colour_and_those_that_hold_nothing_are_left_out() -> None:
    assert [*COLOURS] == [*OWNERS]
    assert [*owners_of(MEMORY.bands)] == ["parameters", "saved", "working"]


def test_a_panel_a_rank_with_peak_and_prediction(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = memory_figure(MEMORY, title="one step")
    first, second = figure.axes
    assert first.get_title(loc="left") == (
        "rank 0: activations at most 1.00 MiB, predicted 1.00 MiB"
    )
    assert second.get_title(loc="left") == "rank 1: activations at most 3 B"
    (line,) = first.get_lines()
    assert list(line.get_ydata()) == [2.0, 2.0]
    assert not second.get_lines()
    highest = max(point[1] for point in first.collections[1].get_paths()[0].vertices)
    assert highest == 2.0
    draw_memory(MEMORY, tmp_path / "memory.svg")
    assert "rank 1" in (tmp_path / "memory.svg").read_text()


def test_formats_are_checked_before_anything_is_drawn() -> None:
    with pytest.raises(AutosplitError, match=r"a name that ends in \.pdf, \.png, \.svg"):
        draw_memory(MEMORY, "memory.odd")


def test_the_timeline_page_has_the_bands(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", 2, 3), lambda action: 0.25)
    path = tmp_path / "page.html"
    write_page([Panel("measured", timeline, bands=MEMORY)], path)
    (text,) = re.findall(r"^const data = (.*);$", path.read_text(), re.MULTILINE)
    (panel,) = json.loads(text)["panels"]
    assert [owner for owner, _ in panel["owners"]] == ["parameters", "saved", "working"]
    assert panel["memory"][0] == [[5000.0, MIB], [5000.0, 2 * MIB]]
    assert panel["held"][1] == [[MIB, 0, 0], [MIB, 0, 3]]


def test_the_page_wants_bands_of_all_ranks(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", 3, 3), lambda action: 0.25)
    with pytest.raises(AutosplitError, match="'odd' has 3 ranks, but memory for 2"):
        write_page([Panel("odd", timeline, bands=MEMORY)], tmp_path / "page.html")
