"""Bands of memory, drawn and on the timeline page."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosplit.errors import AutosplitError
from autosplit.pipeline.ledger.bands import OWNERS, Band, StepMemory, owners_of
from autosplit.report.pictures import COLOURS, draw_memory, memory_figure

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
