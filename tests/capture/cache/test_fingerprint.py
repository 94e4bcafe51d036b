"""Fingerprints of Dynamo's graphs: equal where the joint graphs are, and only there."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_list

from autosplit.capture.cache.argument_text import (
    NoFingerprintError,
    argument_text,
    is_torch_operator,
    target_name,
)
from autosplit.capture.cache.fingerprint import fingerprint_lines
from autosplit.capture.cache.size_symbols import SizeSymbols
from autosplit.capture.export import export


class Scaled(nn.Module):
    def __init__(self, factor: float = 2.0, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


class Constant(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.ones(2)]  # neither a parameter nor a buffer

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.hidden[0]


class Sums(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * 2 + b


def lines_of(module: nn.Module, *args: Tensor) -> list[str]:
    exported, _ = export(module, args, {})
    values = exported.graph.output_node().args[0]
    results = [node.meta.get("val", node.meta.get("example_value")) for node in values]
    symbols = SizeSymbols(exported.meta["fake_mode"])
    return list(fingerprint_lines(module, exported, args, {}, results, symbols))


def batch() -> Tensor:
    return torch.randn(4, 3)


def test_data_do_not_count() -> None:
    model = Scaled()
    assert lines_of(model, batch()) == lines_of(copy.deepcopy(model), batch())
    assert lines_of(model, batch()) == lines_of(Scaled(), batch())


CHANGES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "a number of the model": lambda: (Scaled(3.0), batch()),
    "an integer for a float": lambda: (Scaled(2), batch()),
    "shape": lambda: (Scaled(), torch.randn(5, 3)),
    "strides": lambda: (Scaled(), torch.randn(3, 4).t()),
    "offset": lambda: (Scaled(), torch.randn(5, 3)[1:]),
    "dtype": lambda: (Scaled().double(), batch().double()),
    "requires_grad of the input": lambda: (Scaled(), batch().requires_grad_()),
    "requires_grad of a parameter": lambda: (Scaled().requires_grad_(False), batch()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_tracing_can_see_counts(change: str) -> None:
    assert lines_of(*CHANGES[change]()) != lines_of(Scaled(), batch())


def test_inputs_that_share_memory_are_told_from_those_that_do_not() -> None:
    whole = torch.randn(8, 3)
    same = lines_of(Sums(), whole[:4], whole[4:])
    apart = lines_of(Sums(), whole[:4], torch.randn(8, 3)[4:])
    assert same != apart


def test_a_constant_tensor_has_no_fingerprint() -> None:
    with pytest.raises(NoFingerprintError, match=r"neither an input nor state|holds a constant"):
        lines_of(Constant(), batch())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        (None, "None"),
        ([1, 2], (1, 2)),
        ([12], [1, 2]),
        ({"a": 1}, {"a": 2}),
        (slice(None, 2), slice(2)),
        (torch.float32, torch.float64),
        (torch.device("cpu"), "cpu"),
    ],
    ids=repr,
)
def test_arguments_are_told_apart(one: Any, other: Any) -> None:
    alike = one == other and type(one) is type(other) and repr(one) == repr(other)
    assert (argument_text(one) == argument_text(other)) is alike


def test_lists_of_fx_are_lists() -> None:
    assert argument_text(immutable_list([1, 2])) == argument_text([1, 2])


@pytest.mark.parametrize(
    "named",
    [torch.relu, torch.nn.functional.gelu, operator.mul, torch.ops.aten.mm.default],
    ids=["builtin", "python", "operator", "overload"],
)
def test_functions_of_torch_and_python_have_names(named: Any) -> None:
    assert target_name(named).rpartition(".")[2].rpartition(":")[2] in {
        "relu",
        "gelu",
        "mul",
        "mm",
    }


def double(x: Tensor) -> Tensor:
    return x * 2


def test_code_of_others_has_no_name() -> None:
    with torch.library._scoped_library("autosplit_fingerprint", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        custom = torch.ops.autosplit_fingerprint.twice.default
        assert not is_torch_operator(custom)
        for others in (custom, double, lambda x: x):
            with pytest.raises(NoFingerprintError):
                target_name(others)
