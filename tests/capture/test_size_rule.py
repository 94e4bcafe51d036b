"""Sizes of a graph's outputs follow from the sizes of its inputs, on ranks without the graph."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit import Stage
from autosplit.capture.size_rule import SizeRule
from tests.zoo import Made


def rule_of(forward: Any, *rows: list[Any]) -> SizeRule:
    stage = Stage(Made(lambda m, *args: forward(*args)), rows[0], varying=rows[1:])
    sent: SizeRule = pickle.loads(pickle.dumps(stage.size_rule()))
    return sent


def inputs(rows: int, length: int) -> list[Tensor]:
    return [torch.randn(rows, length, 4, requires_grad=True), torch.randn(length)]


def test_outputs_of_other_sizes() -> None:
    def forward(x: Tensor, y: Tensor) -> Any:
        return x.flatten(0, 1), torch.cat([y, y]), x.sum()

    rule = rule_of(forward, inputs(2, 5), inputs(2, 7))
    assert rule.output_sizes([(2, 9, 4), (9,)]) == ((18, 4), (18,), ())
    assert rule.output_sizes([(2, 9, 4), (6,)]) == ((18, 4), (12,), ())
    assert rule.output_sizes([(3, 9, 4), (9,)]) is None  # the first size did not vary
    assert rule.output_sizes([(2, 1, 4), (9,)]) is None  # which would broadcast
    assert rule.output_sizes([(2, 9, 4)]) is None


def test_inputs_that_are_only_returned_have_sizes_of_their_own() -> None:
    def forward(x: Tensor, mask: Tensor, scales: dict[str, Tensor]) -> Any:
        return x * 2, mask, scales["a"]

    def row(length: int, other: int) -> list[Any]:
        return [*inputs(2, length), {"a": torch.randn(other, 3), "b": torch.randn(other)}]

    rule = rule_of(forward, row(5, 5), row(7, 6))
    assert rule.output_sizes([(2, 9, 4), (9,), (9, 3), (9,)]) == ((2, 9, 4), (9,), (9, 3))
    assert rule.output_sizes([(2, 9, 4), (8,), (6, 3), (1,)]) == ((2, 9, 4), (8,), (6, 3))
    assert rule.output_sizes([(2, 9, 4), (8,), (6, 4), (6,)]) is None
    assert rule.output_sizes([(2, 9, 4), (1,), (6, 3), (6,)]) is None


@pytest.mark.parametrize(("length", "expected"), [(9, ((2, 9, 4),)), (40, None)])
def test_conditions_of_a_branch(length: int, expected: Any) -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y[:, None] if x.shape[1] < 32 else x

    rule = rule_of(forward, inputs(2, 5), inputs(2, 7))
    assert rule.output_sizes([(2, length, 4), (length,)]) == expected
    assert rule.output_sizes([(2, length, 4), (length + 1,)]) is None  # which cannot be multiplied


def test_a_graph_of_fixed_sizes_has_a_rule_for_them_and_for_its_numbers() -> None:
    rule = rule_of(lambda x, factor: x * factor, [torch.randn(2, 3, requires_grad=True), 2.0])
    assert rule.output_sizes([(2, 3), "2.0"]) == ((2, 3),)
    assert rule.output_sizes([(2, 3), "3.0"]) is None
    assert rule.output_sizes([(2, 4), "2.0"]) is None
