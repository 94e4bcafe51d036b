"""chain: what I computes, and what W is left with, where no input needs a gradient."""

from __future__ import annotations

import torch
from torch import nn

from autosplit.passes.graph import Kind
from tests.passes.graphs import names_in, names_out, ops, split
from tests.zoo import Made

MAKING = {"mm", "bmm", "addmm", "embedding_dense_backward", "convolution_backward", "sum"}


def bottom() -> nn.Module:
    """The first layers of a language model: embeddings of tokens and of positions."""
    return Made(
        lambda m, tokens: m.layers(m.tokens(tokens) + m.places(m.at)),
        tokens=nn.Embedding(11, 8),
        places=nn.Embedding(5, 8),
        layers=nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
        at=nn.Buffer(torch.arange(5)),
    )


def test_i_is_the_chain_down_to_the_embeddings() -> None:
    graphs = split(bottom(), torch.randint(0, 11, (3, 5)))
    assert ops(graphs.backward_input)["mm"] == 2
    assert ops(graphs.backward_input)["native_layer_norm_backward"] == 1
    left = ops(graphs.backward_weight)
    assert (left["mm"], left["embedding_dense_backward"]) == (2, 2)
    assert left.keys() <= MAKING


def test_images() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)
    )
    graphs = split(model, torch.randn(2, 3, 12, 12))
    counts = ops(graphs.backward_input)
    assert counts["convolution_backward"] == 1
    assert counts["native_batch_norm_backward"] == 1
    assert ops(graphs.backward_weight) == {"convolution_backward": 2}


def test_products_of_parameters_alone_wait() -> None:
    """Learned queries: no data is in them before attention."""

    model = Made(
        lambda m, x: m.q(m.queries) @ m.k(x).mT,
        queries=nn.Parameter(torch.randn(3, 8)),
        q=nn.Linear(8, 8, bias=False),
        k=nn.Linear(8, 8, bias=False),
    )
    graphs = split(model, torch.randn(2, 5, 8))
    built = names_out(graphs.backward_weight, Kind.PARAMETER_GRAD)
    assert sorted(built) == ["k.weight", "q.weight", "queries"]
    # dK (and dQ, which leads to no product with data) are all that may be early.
    assert ops(graphs.backward_input)["bmm"] + ops(graphs.backward_input)["mm"] == 1
    assert names_in(graphs.backward_weight, Kind.PARAMETER) != []
