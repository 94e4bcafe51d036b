"""The startup benchmark's harness on the smallest model; what it finds is not judged here."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.startup import lengths
from benchmarks.startup.first_step import first_step
from benchmarks.startup.models import MODELS


@pytest.mark.parametrize("way", ["autosplit", "regional aot_eager"])
def test_a_first_step_is_measured(way: str) -> None:
    found = first_step("bert", 2, way)
    assert found["first"] > found["later"] > 0
    assert (found["held"] > 0) == (way == "autosplit")


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_layers_that_are_asked_for(name: str) -> None:
    model, batch = MODELS[name](3)
    assert model.config.num_hidden_layers == 3  # type: ignore[union-attr]
    assert "labels" in batch
    assert model.training


def test_lengths_are_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(lengths, "LENGTHS", (32, 24, 40))
    found = {way: [lengths.lengths("llama", 1, way)] for way in lengths.WAYS}
    assert [found[way][0]["captures"] for way in ("autosplit", "aot_eager", "eager")] == [2, 2, 0]
    row = {"name": "llama 1", "model": "llama", "layers": 1, **found}
    assert "captures \u2264 2: met everywhere." in lengths.render([row])
