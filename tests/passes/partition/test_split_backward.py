"""split_backward: what W may wait with, and what crosses."""

from __future__ import annotations

import torch
from torch import nn

from autosplit.passes import memory_setting, run
from autosplit.passes.analysis.aliasing import distinct_bytes
from autosplit.passes.analysis.operator_cost import graph_flops
from autosplit.passes.graph import Kind, outputs
from tests.passes.graphs import names_out, ops, program_of, split
from tests.zoo import SwiGLU, convolutions


def test_norm_gradient_is_pulled_into_i() -> None:
    """The norm's weight gradient reduces [2, 4, 16] tensors that W would not keep otherwise:
    a vector crosses instead.
    """
    graphs = split(SwiGLU(), torch.randn(2, 4, 16, requires_grad=True))
    assert ops(graphs.backward_weight) == {"mm": 3}
    shapes = [
        tuple(value.meta["val"].shape)
        for _, value in outputs(graphs.backward_input.graph, Kind.DEFERRED)
    ]
    assert (1, 1, 16) in shapes


def test_floor_of_what_crosses() -> None:
    """X and dY of the deferred matrix products, each storage once: the least a fully deferred
    W can do with. The vector of the norm's gradient comes on top.
    """
    batch, dim, hidden = 2 * 4, 16, 40
    graphs = split(SwiGLU(dim, hidden), torch.randn(2, 4, dim, requires_grad=True))
    crossing = [value for _, value in outputs(graphs.backward_input.graph, Kind.DEFERRED)]
    x = dim + hidden  # input of gate and up (one tensor), input of down
    dy = hidden + hidden + dim
    assert distinct_bytes(crossing) == 4 * (batch * (x + dy) + dim)


def test_all_is_deferred_where_nobody_waits_for_i() -> None:
    model, tokens = nn.Sequential(nn.Embedding(11, 8), nn.RMSNorm(8)), torch.randint(0, 11, (3, 5))
    setting = memory_setting("balanced", defer_whole_backward=True)
    graphs = run(program_of(model, tokens).joint, memory=setting)
    assert ops(graphs.backward_input) == {}
    assert names_out(graphs.backward_input, Kind.INPUT_GRAD) == []
    assert ops(graphs.backward_weight) == ops(graphs.backward)


def test_convolutions_are_deferred() -> None:
    graphs = split(convolutions(), torch.randn(4, 3, 8, 8, requires_grad=True))
    assert ops(graphs.backward_weight)["convolution_backward"] == 3
    assert ops(graphs.backward_input)["convolution_backward"] == 3
    halves = (graphs.backward_input.graph, graphs.backward_weight.graph)
    assert sum(map(graph_flops, halves)) == graph_flops(graphs.backward.graph)
