"""Attention of transformers runs the kernel that it runs in eager mode, without a mask."""

from __future__ import annotations

import torch

from tests.semantics.against_autograd import assert_alike
from tests.zoo import llama


def test_gradients_are_those_of_eager_mode() -> None:
    # Four heads share two of keys and values.
    model = llama(hidden_size=32, num_attention_heads=4, use_cache=True).bfloat16()
    ids = torch.randint(0, 32, (2, 16))
    options = {"input_ids": ids, "labels": ids}
    assert_alike(model, lambda call, _: call(**options).loss.backward())


def test_sequences_that_are_packed_do_not_see_each_other() -> None:
    model = llama(hidden_size=32, num_attention_heads=4, use_cache=False)
    ids = torch.randint(0, 32, (1, 8))
    options = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.tensor([[*range(3), *range(5)]]),
    }
    assert_alike(model, lambda call, _: call(**options).loss.backward())
