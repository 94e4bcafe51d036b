"""What a model's key-value cache reads of its configuration is read once, and guarded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import UserFunctionVariable
from transformers import DynamicCache, LlamaConfig, T5Config
from transformers.cache_utils import get_layer_types_and_kwargs

import autosplit
from autosplit.capture.joint_graph import capture
from autosplit.torch_internals import TORCH
from tests.zoo import Made

HEADS, LAYERS = 2, 2
X = torch.randn(2, 8, 4)


def filled_cache(model: Any, x: Tensor) -> DynamicCache:
    """A cache as a model of transformers makes and fills it."""
    keys = model.keys(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    cache = DynamicCache(config=model.config)
    for layer in range(len(cache.layers)):
        cache.update(keys + layer, keys, layer)
    return cache


def caching(layers: int = LAYERS, **settings: Any) -> nn.Module:
    config = LlamaConfig(
        hidden_size=4, num_attention_heads=HEADS, num_hidden_layers=layers, vocab_size=8
    )
    for name, value in settings.items():
        setattr(config, name, value)
    return Made(filled_cache, keys=nn.Linear(4, 4), config=config)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that Dynamo traces."""
    functions: list[Any] = []
    original: Any = UserFunctionVariable.call_function

    def call_function(function: Any, *args: Any) -> Any:
        functions.append(function.fn)
        return original(function, *args)

    monkeypatch.setattr(UserFunctionVariable, "call_function", call_function)
    return functions


def test_further_layers_read_nothing(traced: list[Any]) -> None:
    """Neither attributes that the configuration has, nor those that it lacks."""
    reads = []
    for layers in (2, 4):
        traced.clear()
        autosplit.split(caching(layers))(X)
        reads.append([f.__name__ for f in traced].count("__getattribute__"))
    assert reads[0] == reads[1] > 0


def test_a_changed_attribute_changes_the_cache(traced: list[Any]) -> None:
    """And the function that reads it is not traced."""
    model: Any = caching()
    split = autosplit.split(model)
    first = split(X)
    assert traced
    assert get_layer_types_and_kwargs not in traced
    model.config.sliding_window = 4
    second, expected = split(X), model(X)
    assert [type(layer) for layer in second.layers] == [type(layer) for layer in expected.layers]
    assert type(second.layers[0]) is not type(first.layers[0])
    torch.testing.assert_close(second.layers[0].keys, expected.layers[0].keys, rtol=0, atol=0)


def test_layers_that_differ_are_read_one_by_one() -> None:
    model = caching(
        sliding_window=None,
        per_layer_config={0: {"sliding_window": 4}},
        allow_global_per_layer_attribute_access=True,
    )
    kinds = [type(layer) for layer in model(X).layers]
    assert len({*kinds}) == 2
    assert [type(layer) for layer in autosplit.split(model)(X).layers] == kinds


def cache_length(model: Any, x: Tensor) -> Tensor:
    """``x`` times the number of layers of a cache. The cache reads a copy of the configuration,
    which it makes and changes.
    """
    return x * len(DynamicCache(config=model.config).layers)


@pytest.mark.skipif(TORCH < (2, 13), reason="Dynamo traces no copy.deepcopy of an object")
def test_a_configuration_made_by_the_forward_is_read_as_it_is() -> None:
    model = Made(cache_length, config=T5Config(num_layers=2, num_decoder_layers=3))
    graph = capture(model, (torch.ones(2, requires_grad=True),), {}).joint.graph
    products = [node.args[1] for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert products == [model(torch.ones(())).item()] * 2
