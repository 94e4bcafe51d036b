"""The startup benchmark's harness on the smallest model; what it finds is not judged here."""

from __future__ import annotations

from benchmarks.startup.first_step import first_step


def test_a_first_step_is_measured() -> None:
    found = first_step("bert", 2, "autosplit")
    assert found["first"] > found["later"] > 0
    assert found["held"] > 0
