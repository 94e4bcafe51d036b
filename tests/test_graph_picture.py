"""F, I and W as a picture: the rows of its columns, and the tensors that cross between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autosplit
from autosplit.graph_picture import crossings, draw_graphs, operator_rows
from autosplit.passes.analysis.operators import overload


def test_arrows_lead_from_makers_to_readers_with_their_bytes() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.GELU(), nn.Linear(8, 2, bias=False))
    graphs = autosplit.split(model, torch.ones(3, 4)).functions[0].graphs.graphs()
    names = {}
    for column, graph in enumerate(("forward", "backward_input", "backward_weight")):
        for node, row in operator_rows(graphs[graph].graph).items():
            operator = overload(node)
            name = node.name if operator is None else str(operator.overloadpacket)[5:]
            names[column, row] = f"{'FIW'[column]} {name}"
    arrows = [
        (names[arrow.source], names[arrow.target], arrow.bytes) for arrow in crossings(graphs)
    ]
    assert sorted(arrows) == [
        ("F args_0", "W mm", 4 * 3 * 4),
        ("F gelu", "W mm", 4 * 3 * 8),
        ("F mm", "I gelu_backward", 4 * 3 * 8),
        ("I gelu_backward", "W mm", 4 * 3 * 8),
        ("I grad_output", "W mm", 4 * 3 * 2),
    ]


def test_a_picture_names_the_parameters_of_w(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    split = autosplit.split(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.ones(3, 4))
    split.dump(tmp_path)
    assert "1.weight" in (tmp_path / "graphs.svg").read_text()
    assert not draw_graphs({}, tmp_path / "none.svg", "no graphs")
