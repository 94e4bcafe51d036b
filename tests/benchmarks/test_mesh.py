"""The page on replicas: which cases there are, and what it says of their rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.mesh import exactness, hidden
from benchmarks.mesh.page import PARTS, write
from benchmarks.results import Results


def test_every_stage_has_blocks() -> None:
    for case in exactness.cases():
        names, shape = exactness.MESHES[case.mesh]
        stages = case.stages(dict(zip(names, shape, strict=True)).get("pp", 1))
        assert len(exactness.stage_of(stages - 1, stages)) == exactness.BLOCKS // stages > 0


def test_reductions_that_are_not_hidden_and_two_norms_stand_out(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", {})
    case = next(exactness.cases())
    row = {
        **dataclasses.asdict(case),
        "name": case.name,
        "replicas": 2,
        "equal": True,
        "difference": 0.0,
        "norm": True,
        "norms": [1.5],
        "reductions": 5.0,
        "buckets": 5,
    }
    more = {**row, "name": "other", "schedule": "zb-v", "norms": [2.5], "equal": False}
    results.update("exactness", [row, more], "command", "machine")
    slept = hidden.CASES[0]
    found = {"hidden": 0.5, "hidden_simulated": 0.9, "simulated": 1.0, "without": 0.9}
    rows = [{"name": slept.name, **dataclasses.asdict(slept), **found, "measured": 1.2}]
    results.update("hidden", rows, "command", "machine")
    held = {"name": "zb-v", "ours": 120, "torch": 100, "between": 50, "whole": 200}
    results.update("parameters", [held], "command", "machine")
    write(results)
    page = (tmp_path / "README.md").read_text()
    for part in PARTS.values():
        assert part.title in page
    assert "**2 norms**, 1.5, 2.5" in page
    assert "**50%**" in page
    assert "**1.200**" in page
