"""Checkpoints that are damaged at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.mutations import FORMS, search


@pytest.mark.parametrize("form", FORMS)
def test_damaged_checkpoints_are_refused_or_load_right(form: str, tmp_path: Path) -> None:
    if "safetensors" in form:
        pytest.importorskip("safetensors")
    outcomes = search(form, 25, tmp_path)
    assert outcomes.total() >= 25
    assert outcomes["refused"] > 8
