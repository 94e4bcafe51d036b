"""The page on meshes: what it says of its rows, and the bound beside them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import fx

from benchmarks.mesh import beside, collectives, hidden
from benchmarks.mesh.page import PAGE
from benchmarks.results import Results

_EXCHANGE = torch.ops._c10d_functional


def test_least_exposed_time_follows_from_dependences() -> None:
    """One collective between two operators, and a third operator beside it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    before, beside_it = (graph.call_function(torch.relu, (x,)) for _ in range(2))
    start = graph.call_function(_EXCHANGE.all_reduce.default, (before, "sum", "0"))
    wait = graph.call_function(_EXCHANGE.wait_tensor.default, (start,))
    after = graph.call_function(torch.relu, (wait,))
    nodes = [before, start, wait, after, beside_it]
    for length, expected in ((1.0, 2.0), (3.0, 0.0), (9.0, 0.0)):
        seconds = {before: 1.0, start: 5.0, wait: 5.0, after: 1.0, beside_it: length}
        assert collectives.least_exposed(nodes, seconds, delay=3.0) == expected


def test_reductions_that_are_not_hidden_stand_out(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", {})
    slept = hidden.CASES[0]
    found = {"hidden": 0.5, "hidden_simulated": 0.9, "simulated": 1.0, "without": 0.9}
    rows = [{"name": slept.name, **dataclasses.asdict(slept), **found, "measured": 1.2}]
    results.update("hidden", rows, "command", "machine")
    held = {"name": "zb-v", "ours": 120, "torch": 100, "between": 50, "whole": 200}
    results.update("parameters", [held], "command", "machine")
    sent = {"name": "split, 1", "way": "split", "delay": 0.001, "seconds": 0.1, "total": 0.006}
    sent |= {"hidden": 0.004, "hideable": 0.005, "beside": 0.9, "same": True}
    results.update("collectives", [sent], "command", "machine")
    torchs = {"name": "torch's", "mesh": "pp 2", "schedule": "1f1b", "way": beside.TORCH}
    torchs |= {"said": "", "seconds": [1.0, 2.0], "peak": 2**20, "same": True}
    ours = {**torchs, "name": "ours", "way": beside.TRAINER, "seconds": [1.1, 2.4], "same": False}
    fails = {**torchs, "name": "fails", "mesh": "pp 3", "seconds": [], "said": "it broke"}
    alone = {**ours, "name": "alone", "mesh": "pp 3", "peak": 2**21}
    results.update("beside", [torchs, ours, fails, alone], "command", "machine")
    PAGE.write(results)
    page = (tmp_path / "README.md").read_text()
    for part in PAGE.parts.values():
        assert part.title in page
    assert "**50%**" in page
    assert "**1.200**" in page
    assert "**80%**" in page
    rows = [[cell.strip() for cell in line.split("|")[3:-1]] for line in page.splitlines()]
    shown = [row for row in rows if row[:1] in ([beside.TORCH], [beside.TRAINER])]
    assert shown[1][1:] == ["1750", "1100 to 2400", "**1.15**", "1.10 to 1.20", "1.0", "1.00", "no"]
    assert (shown[2][1], shown[2][-1]) == ("fails", "it broke")
    assert shown[3][1:] == ["1750", "1100 to 2400", "", "", "2.0", "", ""]
