"""The startup benchmark's harness on the smallest model; what it finds is not judged here."""

from __future__ import annotations

import pytest

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
