"""The startup benchmark's harness on the smallest model; what it finds is not judged here."""

from __future__ import annotations

from benchmarks.startup.first_step import first_step


def test_a_first_step_is_measured() -> None:
    result = first_step("bert", 2, "autosplit")
    assert result["first"] > result["later"] > 0
    assert result["held"] > 0
