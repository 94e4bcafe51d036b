"""manager: order, verification, and the numbered dump."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autosplit.passes import Pass, PassError, SplitGraphs, manager, run
from tests.passes.graphs import joint_of

CONVOLUTION = (nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5, requires_grad=True))


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a pass before those of the pipeline."""

    def put(first: Callable[[SplitGraphs], bool]) -> None:
        named = Pass(first.__name__, first)
        monkeypatch.setattr(manager, "PASSES", (named, *manager.PASSES))

    return put


def test_pass_that_hides_a_change(pipeline: Callable[..., None]) -> None:
    def sly(program: SplitGraphs) -> bool:
        graph = program.joint.graph
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch.ops.aten.rand.default, ([3],))
        return False

    pipeline(sly)
    with pytest.raises(PassError, match="pass sly reported no change but changed the graph"):
        run(joint_of(*CONVOLUTION))


def test_pass_that_breaks_an_invariant_is_named(pipeline: Callable[..., None]) -> None:
    def breaks(program: SplitGraphs) -> bool:
        for node in program.joint.graph.nodes:
            node.meta.pop("val", None)
        return True

    pipeline(breaks)
    with pytest.raises(PassError, match="after breaks:\n"):
        run(joint_of(*CONVOLUTION))


def test_no_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "PASSES", ())
    with pytest.raises(PassError, match="no pass made a forward graph"):
        run(joint_of(*CONVOLUTION))


def test_dump_numbers_every_stage_and_counts_the_difference(tmp_path: pathlib.Path) -> None:
    run(joint_of(*CONVOLUTION), dump=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00_capture.joint.py",
        "01_divide_backward_operators.joint.py",
        "08_partition.backward.py",
        "08_partition.forward.py",
        "09_split_backward.backward_input.py",
        "09_split_backward.backward_weight.py",
    ]
    divided = (tmp_path / "01_divide_backward_operators.joint.py").read_text()
    assert divided.startswith("# joint after divide_backward_operators: ")
    assert "#   +1 aten.convolution_backward.default\n" in divided
    for path in tmp_path.iterdir():
        compile(path.read_text(), str(path), "exec")
