"""Attention of transformers runs the kernel that it runs in eager mode, without a mask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import autosplit

transformers = pytest.importorskip("transformers")


def model() -> Any:
    """Four heads share two of keys and values."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_those_of_eager_mode(padded: bool) -> None:
    plain, ids = model(), torch.randint(0, 64, (2, 16))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :4] = 0
    given = {"input_ids": ids, "labels": ids}
    if padded:
        given["attention_mask"] = mask
    twin = copy.deepcopy(plain)
    split = autosplit.split(twin)
    for each in (plain, split):
        each(**given).loss.backward()
    split.backward_weight()
    for name, parameter in plain.named_parameters():
        assert torch.equal(twin.get_parameter(name).grad, parameter.grad), name
