"""strides: what addresses memory is checked as it runs."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autosplit.passes.errors import StrideError
from autosplit.passes.lowering.codegen import stride_check

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


def test_other_strides_raise_an_error_of_the_passes() -> None:
    check = "\n".join(stride_check(call(torch.empty(2, 3)), str))
    function = f"def run(x):\n{check}\n    return x"
    space: dict[str, object] = {}
    exec(function, space)
    as_traced = torch.empty(2, 3)
    assert space["run"](as_traced) is as_traced
    with pytest.raises(StrideError, match=r"with strides \(3, 1\), as tracing .*strides \(1, 2\)"):
        space["run"](torch.empty(3, 2).t())
    assert "autosplit import" not in check
