"""manager: order, verification, skipping, and the numbered dump."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

from autosplit.passes import PASSES, Pass, PassError, SplitProgram, run
from tests.passes.graphs import joint_of, ops

CONVOLUTION = (nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5, requires_grad=True))


def test_pipeline_is_a_literal() -> None:
    assert [each.name for each in PASSES] == [
        "divide",
        "dropout",
        "dead_code",
        "gather",
        "lift",
        "partition",
        "split_backward",
    ]


def test_skip_an_optional_pass() -> None:
    whole = run(joint_of(*CONVOLUTION))
    assert ops(whole.backward_weight) == {"convolution_backward": 1}
    fused = run(joint_of(*CONVOLUTION), skip=["divide"])
    assert ops(fused.backward_weight) == {}


def test_skip_what_cannot_be_skipped() -> None:
    with pytest.raises(
        PassError,
        match=r"cannot skip inline, partition; passes that can be: "
        r"\['divide', 'dropout', 'dead_code', 'gather', 'lift'\]",
    ):
        run(joint_of(*CONVOLUTION), skip=["partition", "inline"])


def test_pass_that_hides_a_change() -> None:
    def sly(program: SplitProgram) -> bool:
        graph = program.joint.graph
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch.ops.aten.rand.default, ([3],))
        return False

    with pytest.raises(PassError, match="pass sly reported no change but changed the graph"):
        run(joint_of(*CONVOLUTION), passes=(Pass("sly", sly), *PASSES))


def test_pass_that_breaks_an_invariant_is_named() -> None:
    def breaks(program: SplitProgram) -> bool:
        for node in program.joint.graph.nodes:
            node.meta.pop("val", None)
        return True

    with pytest.raises(PassError, match="after breaks:\n"):
        run(joint_of(*CONVOLUTION), passes=(Pass("breaks", breaks), *PASSES))


def test_no_partition() -> None:
    with pytest.raises(PassError, match="has no partition pass"):
        run(joint_of(*CONVOLUTION), passes=())


def test_dump_numbers_every_stage_and_counts_the_difference(tmp_path: pathlib.Path) -> None:
    run(joint_of(*CONVOLUTION), dump=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00_capture.joint.py",
        "01_divide.joint.py",
        "06_partition.backward.py",
        "06_partition.forward.py",
        "07_split_backward.backward_input.py",
        "07_split_backward.backward_weight.py",
    ]
    divided = (tmp_path / "01_divide.joint.py").read_text()
    assert divided.startswith("# joint after divide: ")
    assert "#   +1 aten.convolution_backward.default\n" in divided
    for path in tmp_path.iterdir():
        compile(path.read_text(), str(path), "exec")
