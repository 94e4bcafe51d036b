"""One timeline into a file, whose suffix says as what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autosplit
from autosplit.pipeline import build, simulate

TIMELINE = simulate(build("1f1b", 2, 2), lambda action: 1.0)


def test_the_suffix_says_as_what(tmp_path: Path) -> None:
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    autosplit.write_timeline(TIMELINE, picture, title="A step")
    autosplit.write_timeline(TIMELINE, trace)
    assert "<svg" in picture.read_text()
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]) == 12
    with pytest.raises(autosplit.AutosplitError, match="expected a name that ends in"):
        autosplit.write_timeline(TIMELINE, tmp_path / "step.html")
