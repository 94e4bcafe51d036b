"""Checkpoints that are damaged at random."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autosplit.errors import CheckpointError
from tests.checkpoint import mutations
from tests.checkpoint.mutations import FORMS, Judge, Mutation, WrongError, search


@pytest.mark.parametrize("form", FORMS)
def test_damaged_checkpoints_are_refused_or_load_right(form: str, tmp_path: Path) -> None:
    if "safetensors" in form:
        pytest.importorskip("safetensors")
    outcomes = search(form, 25, tmp_path)
    assert outcomes.total() >= 25
    assert outcomes["refused"] > 8


def test_the_judge_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge("torch.save", tmp_path)
    damage = [Mutation("cut", 0.0, 0.5, 1, 1)]
    judge(damage)
    assert judge.outcomes == {"refused": 1}

    def wrong(engine: object, path: object, **options: object) -> None:
        torch.nn.init.zeros_(judge._bench.engine.modules[0].get_parameter("0.weight"))

    def half(engine: object, path: object, **options: object) -> None:
        wrong(engine, path)
        raise CheckpointError

    def untyped(engine: object, path: object, **options: object) -> None:
        raise KeyError

    def hanging(engine: object, path: object, **options: object) -> None:
        while True:
            pass

    monkeypatch.setattr(mutations, "SECONDS", 0.2)
    for load, message in (
        (wrong, "wrong values were loaded"),
        (half, "it was refused, but something was loaded"),
        (untyped, "gave KeyError"),
        (hanging, "gave TimeoutError"),
    ):
        monkeypatch.setattr(mutations, "load_checkpoint", load)
        with pytest.raises(WrongError, match=message):
            judge(damage)
