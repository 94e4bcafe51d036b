"""operators: which are random, attention, effects, accumulations, or to be recomputed."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from autosplit.passes.analysis.operators import (
    is_attention,
    is_effect,
    is_random,
)
from autosplit.passes.graph import ORIGIN, Origin

aten = torch.ops.aten


def call(target: Any, *args: Any, origin: Origin | None = None) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, tuple(x if arg is ... else arg for arg in args))
    if origin:
        node.meta[ORIGIN] = origin
    return node


def attention(dropout: float) -> fx.Node:
    return call(aten._scaled_dot_product_flash_attention_for_cpu.default, ..., ..., ..., dropout)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (call(aten.rand_like.default, ...), True),
        (call(aten.native_dropout.default, ..., 0.5, True), True),
        (call(aten.mul.Tensor, ..., 2), False),
        (call(operator.getitem, ..., 0), False),
        (attention(0.1), True),
        (attention(0.0), False),  # tagged as random, and draws nothing
        # Draws again what its forward drew, from the same seed.
        (call(aten._scaled_dot_product_efficient_attention_backward.default, ...), False),
        # A custom operator that writes into its arguments is the argument of another.
        (call(torch.ops.higher_order.auto_functionalized_v2, aten.bernoulli_.float), True),
    ],
)
def test_random(node: fx.Node, expected: bool) -> None:
    assert is_random(node) == expected


def test_attention_is_the_forward_of_a_fused_operator() -> None:
    assert is_attention(attention(0.1))
    assert is_attention(call(aten._flash_attention_forward.default, ...))
    assert not is_attention(call(aten._scaled_dot_product_efficient_attention_backward.default))
    assert not is_attention(call(aten._softmax.default, ..., 0, False))


def test_effects() -> None:
    assert is_effect(call(aten._assert_async.msg, ..., "positive"))
    assert is_effect(call(aten.add_.Tensor, ..., 1))
    assert is_effect(call(aten._linalg_check_errors.default, ...))
    assert not is_effect(call(aten.rand_like.default, ...))
    assert not is_effect(call(aten.add.Tensor, ..., 1))
    (placeholder,) = [n for n in call(aten.neg.default, ...).graph.nodes if n.op == "placeholder"]
    assert not is_effect(placeholder)
