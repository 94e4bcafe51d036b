"""Some of the faults that ``benchmarks.faults`` tries: all ranks end, and say who and why."""

from __future__ import annotations

import pytest

from benchmarks.faults.cells import PLACES, Cell, cells
from benchmarks.faults.judge import judge, names
from benchmarks.faults.page import render
from benchmarks.results import Results


@pytest.mark.parametrize(
    "cell",
    [
        Cell("kill", "compile", 3, "launch"),
        Cell("stop", "optimizer", 2, "launch"),
        Cell("sleep", "loader", 2, "torchrun"),
    ],
    ids=lambda cell: cell.name,
)
def test_every_survivor_names_rank_and_cause(cell: Cell) -> None:
    found = judge(cell, timeout=4.0)
    assert found.wrong == []
    assert found.alive == 0
    assert found.left == []
    assert found.named == cell.ranks - 1
    assert found.told is (True if cell.launcher == "launch" else None)


def test_a_message_without_rank_or_cause_is_none() -> None:
    cell = Cell("kill", "F", 4, "launch")
    assert names(cell, "rank 1 was killed by SIGKILL in the forward and backward")
    assert not names(cell, "rank 2 was killed by SIGKILL in the forward and backward")
    assert not names(cell, "rank 0 lost rank 1 (was a process killed?)")


def test_every_fault_has_its_place_on_the_page() -> None:
    names = [cell.name for cell in cells()]
    assert len({*names}) == len(names)
    row = {"ranks": 2, "waits": False, "timeout": 8.0, "good": True, "named": 1, "silent": 0}
    more = {"wrong": [], "alive": 0, "left": [], "told": True, "seconds": 0.25}
    rows = [{"name": name, **row, **more} for name in names]
    rows[0] |= {"good": False, "named": 0, "wrong": ["rank 0: no error"]}
    part = {"environment": "torch", "commands": ["python -m benchmarks.faults"], "rows": rows}
    page = render(Results(None, {"faults": part}))  # type: ignore[arg-type]  # nothing is written
    assert f"**{len(rows) - 1} of {len(rows)} faults** came out so" in page
    assert f"- {names[0]}: rank 0: no error" in page
    assert all(place in page for place in PLACES)
    assert "not run" not in page
