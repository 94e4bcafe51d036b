"""What a model's key-value cache reads of its configuration is read once, and guarded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.variables import UserFunctionVariable
from transformers.cache_utils import get_layer_types_and_kwargs

import autosplit
from tests.zoo import llama

IDS = torch.randint(0, 32, (2, 8))


def test_a_changed_attribute_changes_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the function that reads it is not traced."""
    traced = []
    original: Any = UserFunctionVariable.call_function

    def call_function(function: Any, *args: Any) -> Any:
        traced.append(function.fn)
        return original(function, *args)

    monkeypatch.setattr(UserFunctionVariable, "call_function", call_function)
    model = llama(use_cache=True)
    split = autosplit.split(model)
    first = split(input_ids=IDS).past_key_values
    assert traced
    assert get_layer_types_and_kwargs not in traced
    model.config.sliding_window = 4
    second, expected = split(input_ids=IDS).past_key_values, model(input_ids=IDS).past_key_values
    assert [type(layer) for layer in second.layers] == [type(layer) for layer in expected.layers]
    assert type(second.layers[0]) is not type(first.layers[0])
    torch.testing.assert_close(second.layers[0].keys, expected.layers[0].keys, rtol=0, atol=0)


def test_layers_that_differ_are_read_one_by_one() -> None:
    model = llama(use_cache=True, num_hidden_layers=2)
    model.config.sliding_window = None
    model.config.per_layer_config = {0: {"sliding_window": 4}}
    model.config.allow_global_per_layer_attribute_access = True
    kinds = [type(layer) for layer in model(input_ids=IDS).past_key_values.layers]
    assert len({*kinds}) == 2
    cache = autosplit.split(model)(input_ids=IDS).past_key_values
    assert [type(layer) for layer in cache.layers] == kinds
