"""Steps of eight sequence lengths, each in the process's first eight steps.

``python -m benchmarks.startup.lengths MODEL LAYERS WAY`` prints the seconds that they took as JSON,
and how many graphs were captured.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import autosplit

from ..results import Rows, Target, table, verdicts
from .fresh_process import command, measured
from .measure import Settings
from .models import MODELS

LENGTHS = (32, 24, 40, 17, 48, 29, 60, 12)

CAPTURES = Target("captures", at_most=2.0, style=".0f")
DEPTH = 32  # the depth of the second target
RATIO = Target("ours / theirs", at_most=0.35, style=".2f")

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "autosplit": autosplit.split,
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
    "eager": lambda model: model,
}


def lengths(name: str, layers: int, way: str) -> dict[str, Any]:
    """Seconds of the first step of each length, weight gradients included; imports do not count."""
    torch.manual_seed(0)
    model, batch = MODELS[name](layers)
    rows, known = len(batch["input_ids"]), int(batch["input_ids"].max())
    torch._dynamo.reset()
    counters.clear()
    face, took = WAYS[way](model), []
    for length in LENGTHS:
        ids = torch.randint(3, known + 1, (rows, length))
        start = time.perf_counter()
        face(input_ids=ids, labels=ids).loss.backward()
        if isinstance(face, autosplit.SplitModule):
            face.backward_weight()
        took.append(time.perf_counter() - start)
    split = isinstance(face, autosplit.SplitModule)
    captures = len(face.functions) if split else counters["stats"]["unique_graphs"]
    return {"seconds": took, "captures": captures}


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each text model and depth; processes with empty caches take turns."""
    texts = [name for name in settings.models if name != "vit"]
    for model in texts:
        for layers in settings.depths((2, 8, 32)):
            found: dict[str, list[Any]] = {way: [] for way in WAYS}
            for _ in range(settings.turns):
                for way, took in found.items():
                    took.append(_measured(model, layers, way))
            yield {"name": f"{model} {layers}", "model": model, "layers": layers, **found}


def render(rows: Rows) -> str:
    """Seconds of all lengths together, and the captures among them."""
    headers = ["model", "layers", "eager s", "torch.compile s", "graphs", "autosplit s"]
    headers += [CAPTURES.name, RATIO.name]
    cells, captures, ratios = [], {}, {}
    for row in rows:
        eager, theirs, ours = (_seconds(row[way]) for way in ("eager", "aot_eager", "autosplit"))
        captures[row["name"]] = float(row["autosplit"][-1]["captures"])
        if row["layers"] == DEPTH:
            ratios[row["name"]] = ours / theirs
        cells.append(
            [
                row["model"],
                str(row["layers"]),
                f"{eager:.2f}",
                f"{theirs:.1f}",
                str(row["aot_eager"][-1]["captures"]),
                f"{ours:.1f}",
                CAPTURES.cell(captures[row["name"]]),
                RATIO.cell(ours / theirs) if row["layers"] == DEPTH else f"{ours / theirs:.2f}",
            ]
        )
    return f"{table(headers, cells)}\n\n{verdicts([(CAPTURES, captures), (RATIO, ratios)])}"


def _seconds(turns: list[dict[str, Any]]) -> float:
    return float(statistics.median(sum(each["seconds"]) for each in turns))


def _measured(model: str, layers: int, way: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        return measured("benchmarks.startup.lengths", model, layers, way, cache)


def main() -> None:
    command(__doc__, WAYS, lengths)


if __name__ == "__main__":
    main()
