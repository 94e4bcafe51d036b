"""manager: order, verification, and the numbered dump."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autosplit.passes import (
    GRAPH_PASSES,
    PASSES,
    GraphPass,
    Kind,
    Pass,
    PassError,
    SplitGraphs,
    manager,
    run,
)
from autosplit.passes.graph import calls, inputs
from autosplit.passes.lowering.forms import GraphForm, is_donated
from tests.passes.graphs import joint_of

SIGMOID = (nn.Sequential(nn.Sigmoid(), nn.Linear(3, 3)), torch.randn(2, 3, requires_grad=True))
CONVOLUTION = (nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5, requires_grad=True))


def first(function: Callable[[SplitGraphs], bool]) -> tuple[Pass, ...]:
    """The pipeline with this pass before the others."""
    return (Pass(function.__name__, function), *PASSES)


def test_pass_that_hides_a_change() -> None:
    def sly(program: SplitGraphs) -> bool:
        graph = program.joint.graph
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch.ops.aten.rand.default, ([3],))
        return False

    with pytest.raises(PassError, match="pass sly added or removed nodes but returned False"):
        run(joint_of(*CONVOLUTION), passes=first(sly))


def test_pass_that_breaks_an_invariant_is_named() -> None:
    def breaks(program: SplitGraphs) -> bool:
        for node in program.joint.graph.nodes:
            node.meta.pop("val", None)
        return True

    with pytest.raises(PassError, match="after breaks:\n"):
        run(joint_of(*CONVOLUTION), passes=first(breaks))


def test_no_partition() -> None:
    with pytest.raises(PassError, match="no pass made a forward graph"):
        run(joint_of(*CONVOLUTION), passes=())


def test_dump_numbers_every_stage_and_counts_the_difference(tmp_path: pathlib.Path) -> None:
    run(joint_of(*CONVOLUTION), dump=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00_capture.joint.py",
        "01_divide_backward_operators.joint.py",
        "10_partition.backward.py",
        "10_partition.forward.py",
        "11_split_backward.backward_input.py",
        "11_split_backward.backward_weight.py",
    ]
    divided = (tmp_path / "01_divide_backward_operators.joint.py").read_text()
    assert divided.startswith("# joint after divide_backward_operators: ")
    assert "#   +1 aten.convolution_backward.default\n" in divided
    for path in tmp_path.iterdir():
        compile(path.read_text(), str(path), "exec")


def test_graph_passes_are_verified_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(program: SplitGraphs, form: GraphForm) -> dict[str, torch.fx.GraphModule]:
        for node in calls(program.forward.graph):
            del node.meta["val"]
        return {form.graph: program.forward}

    entry = GraphPass("breaks", manager.When.COMPILED, breaks)
    monkeypatch.setattr(manager, "GRAPH_PASSES", (entry, *GRAPH_PASSES))
    program, form = run(joint_of(*CONVOLUTION)), GraphForm("forward")
    assert manager.run_graph_passes(manager.When.ACCUMULATING, program, GraphForm()).keys() == {
        "backward_accumulating"
    }
    with pytest.raises(PassError, match="after breaks:\n"):
        manager.run_graph_passes(manager.When.COMPILED, program, form)


def test_strides_and_donations_reach_the_readers_of_a_graph() -> None:
    program = run(joint_of(*SIGMOID))
    assert program.backward is not None
    role, node = next(iter(inputs(program.backward.graph, Kind.SAVED).items()))
    form = GraphForm("forward", strides={role: (1, 2)}, donated=frozenset([role]))
    changed = manager.run_graph_passes(manager.When.COMPILED, program, form)
    assert changed.keys() == {"backward", "backward_input"}
    assert node.meta["val"].stride() == (1, 2)
    assert is_donated(node)
