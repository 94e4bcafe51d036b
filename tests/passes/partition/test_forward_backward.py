"""partition: what forward saves, and what stays out of the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autosplit.passes import PassError, Role, SplitGraphs
from autosplit.passes.analysis.aliasing import is_view
from autosplit.passes.graph import Kind, outputs
from autosplit.passes.partition.split_graphs import partition_forward_backward
from autosplit.passes.verify import verify
from tests.passes.graphs import hand_made, names_in, names_out, ops, program_of
from tests.zoo import Attention


def partitioned(module: nn.Module, *args: Tensor) -> SplitGraphs:
    program = program_of(module, *args)
    assert partition_forward_backward(program)
    verify(program)
    return program


def test_storage_is_saved_not_its_views() -> None:
    """q, k and v are views of one matrix product; the product is saved, once."""
    program = partitioned(Attention(), torch.randn(2, 8, 16, requires_grad=True))
    saved = names_out(program.forward, Kind.SAVED)
    assert saved.count("qkv_output") == 1
    values = [value for _, value in outputs(program.forward.graph, Kind.SAVED)]
    assert not [value.name for value in values if is_view(value)]


def test_overwritten_buffer_is_saved_as_a_copy() -> None:
    """The forward of the next microbatch writes ``scale`` before this one's backward reads it."""
    module, nodes = hand_made()
    graph = module.graph
    with graph.inserting_before(nodes["y"]):
        scale = graph.placeholder("scale")
    with graph.inserting_before(nodes["dx"]):
        new = graph.call_function(torch.ops.aten.add.Tensor, (scale, 1))
    for node in (scale, new):
        node.meta["val"] = torch.empty(3, device="meta")
    scale.meta["role"] = Role(Kind.BUFFER, "scale")
    nodes["dx"].args = (nodes["g"], scale)
    output = graph.output_node()
    output.args = ([*output.args[0], new],)
    output.meta["roles"] = (*output.meta["roles"], Role(Kind.UPDATE, "scale"))
    program = SplitGraphs(module)
    partition_forward_backward(program)
    verify(program)
    assert ops(program.forward) == {"mul": 1, "add": 1, "clone": 1}
    assert names_in(program.backward, Kind.BUFFER) == []
    assert names_in(program.backward, Kind.SAVED) == ["scale"]


def test_output_that_depends_on_a_gradient() -> None:
    module, nodes = hand_made()
    nodes["y"].args = (nodes["g"], 2)
    with pytest.raises(PassError, match="forward values depend on output gradients: g, mul"):
        partition_forward_backward(SplitGraphs(module))
