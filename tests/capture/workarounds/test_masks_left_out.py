"""Attention of transformers runs the kernel that it runs in eager mode, without a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.semantics.against_autograd import assert_alike
from tests.zoo import llama


def layers(**settings: Any) -> nn.Module:
    """A Llama without its head. Four heads share two of keys and values."""
    model: Any = llama(hidden_size=32, num_attention_heads=4, **settings)
    result: nn.Module = model.model
    return result


def backward(output: Any) -> None:
    output.last_hidden_state.square().mean().backward()


def test_gradients_are_those_of_eager_mode() -> None:
    model = layers(use_cache=True).bfloat16()
    ids = torch.randint(0, 32, (2, 16))
    assert_alike(model, lambda call, _: backward(call(input_ids=ids)))


def test_sequences_that_are_packed_do_not_see_each_other() -> None:
    ids, positions = torch.randint(0, 32, (1, 8)), torch.tensor([[*range(3), *range(5)]])
    assert_alike(layers(), lambda call, _: backward(call(input_ids=ids, position_ids=positions)))
