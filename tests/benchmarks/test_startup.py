"""The startup benchmark's harness on the smallest model; what it finds is not judged here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import Results
from benchmarks.startup import lengths
from benchmarks.startup.first_step import first_step
from benchmarks.startup.measure import Aim, render
from benchmarks.startup.models import MODELS
from benchmarks.startup.page import PAGE


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


def _row(layers: int, first: float) -> dict[str, Any]:
    def took(seconds: float) -> list[dict[str, Any]]:
        return [{"first": seconds, "later": 0.01, "held": 2048}]

    ways = {"ours": took(first), "theirs": took(10.0), "regional": took(2.0)}
    return {"name": f"llama {layers}", "model": "llama", "layers": layers, **ways}


def test_figures_that_miss_their_target_are_bold(tmp_path: Path) -> None:
    aim = Aim(32, 0.25, 1.27)
    good = [_row(8, 1.0), _row(32, 2.5), _row(80, 3.16)]
    assert "**" not in render(aim, good)
    assert "Target s a layer ≤ 0.030: met everywhere." in render(aim, good)
    bad = [_row(8, 1.0), _row(32, 2.6), _row(80, 5.0)]
    text = render(aim, bad)
    assert "**0.26**" in text
    assert "Target over torch.compile ≤ 0.25: missed by llama (0.26)." in text
    assert "Target over blocks ≤ 1.27: missed by llama (1.30)." in text
    assert "Target s a layer ≤ 0.030: missed by llama (0.056)." in text
    results = Results.read(tmp_path / "results.json")
    results.update("eager", bad, "the command", "the environment")
    assert "the command" in PAGE.render(results)


def test_lengths_are_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(lengths, "LENGTHS", (32, 24, 40))
    found = {way: [lengths.lengths("llama", 1, way)] for way in lengths.WAYS}
    assert [found[way][0]["captures"] for way in ("autosplit", "aot_eager", "eager")] == [2, 2, 0]
    row = {"name": "llama 1", "model": "llama", "layers": 1, **found}
    assert "captures \u2264 2: met everywhere." in lengths.render([row])
