"""The startup benchmark's harness on the smallest model; what it finds is not judged here."""

from __future__ import annotations

import pytest

from benchmarks.startup.first_step import first_step


@pytest.mark.parametrize("way", ["autosplit", "regional aot_eager"])
def test_a_first_step_is_measured(way: str) -> None:
    found = first_step("bert", 2, way)
    assert found["first"] > found["later"] > 0
    assert (found["held"] > 0) == (way == "autosplit")
