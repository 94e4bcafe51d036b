"""Dead code: effects stay, and random operators of the forward."""

from __future__ import annotations

import pytest
import torch

from autosplit.passes import SplitGraphs
from autosplit.passes.graph import calls
from autosplit.passes.rewrites.emit import dead_code
from tests.passes.graphs import hand_made

# --- dead_code: effects stay, and random operators of the forward ---------------------------------


def targets_after(target: object, *args: object, graph: str = "joint") -> list[str]:
    module, nodes = hand_made()
    with module.graph.inserting_before(nodes["dx"]):
        arguments = tuple(nodes.get(arg, arg) if isinstance(arg, str) else arg for arg in args)
        module.graph.call_function(target, arguments)
    program = SplitGraphs(hand_made()[0])
    setattr(program, graph, module)
    changed = dead_code(program)
    names = [str(node.target) for node in calls(module.graph)]
    assert changed == (len(names) == 2)
    return names


def test_operator_nobody_reads() -> None:
    assert targets_after(torch.ops.aten.sin.default, "x") == ["aten.mul.Tensor"] * 2


@pytest.mark.parametrize("graph", ["joint", "forward", "backward", "backward_weight"])
def test_random_operator_nobody_reads(graph: str) -> None:
    kept = targets_after(torch.ops.aten.native_dropout.default, "x", 0.5, True, graph=graph)
    draws = ["aten.native_dropout.default"] if graph in ("joint", "forward") else []
    assert kept == ["aten.mul.Tensor", *draws, "aten.mul.Tensor"]


# --- Erasing a few nodes of a large graph looks at those only -------------------------------------
