"""Models of transformers, called as people call them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autosplit
from autosplit.passes.analysis.operator_cost import graph_flops
from autosplit.passes.partition.multiplier_search import memory_tradeoff
from tests.gradients import assert_same_gradients


@pytest.fixture
def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,  # grouped queries round otherwise than in eager mode
        vocab_size=32,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def test_ids_are_their_own_labels(llama: nn.Module) -> None:
    """One capture of one whole graph, and every product for a weight waits."""
    plain = copy.deepcopy(llama)
    split = autosplit.split(llama, fullgraph=True)
    for _ in range(3):
        ids = torch.randint(0, 32, (2, 6))
        losses: list[Any] = []
        for module in (split, plain):
            losses.append(module(input_ids=ids, labels=ids).loss)
            losses[-1].backward()
        assert torch.equal(*losses)
    split.backward_weight()
    (functions,) = split.functions
    graphs = functions.graphs
    assert memory_tradeoff(graphs.joint.graph, graphs.memory).early_flops == 0
    assert graphs.backward_weight is not None
    assert graph_flops(graphs.backward_weight.graph) > 0
    assert not functions.dependence.inseparable
    assert_same_gradients(llama, plain)
