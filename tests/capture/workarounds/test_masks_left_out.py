"""Attention of transformers runs the kernel that it runs in eager mode, without a mask."""

from __future__ import annotations

import copy

import pytest
import torch

import autosplit
from tests.zoo import llama


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_those_of_eager_mode(padded: bool) -> None:
    # Four heads share two of keys and values.
    plain = llama(hidden_size=32, num_attention_heads=4, use_cache=True).bfloat16()
    ids = torch.randint(0, 32, (2, 16))
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
