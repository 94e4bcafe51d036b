"""strides: what addresses memory is checked as it runs."""

from __future__ import annotations

import torch
from torch import fx

from autosplit.passes.lowering.stride_checks import stride_check

aten = torch.ops.aten


def call(operand: torch.Tensor, target: object = aten.as_strided.default) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = operand
    return graph.call_function(target, (x, [2], [1]))


def lines(node: fx.Node) -> list[str]:
    return [line.strip() for line in stride_check(node, str)]


def test_dimensions_of_one_element_may_have_any_stride() -> None:
    first, *_ = lines(call(torch.empty(2, 1, 3)))
    assert first == "if (x.stride(0), x.stride(2),) != (3, 1):"
    assert lines(call(torch.empty(1))) == lines(call(torch.empty(3, 0))) == []


def test_other_operators_are_not_checked() -> None:
    assert lines(call(torch.empty(2, 3), aten.view.default)) == []
