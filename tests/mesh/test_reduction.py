"""Buckets of gradients, and the norm of all."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autosplit.mesh import exact_norm
from autosplit.mesh.exact_norm import norm_of, sum_of_squares
from autosplit.mesh.reduction import ReductionQueue, fill_buckets

# --- which gradients share a bucket, and in which order buckets leave -----------------------------


def test_kinds_are_apart_and_the_first_complete_leaves_first() -> None:
    sizes = [("a", 1), ("b", 1), ("b", 1), ("a", 1), ("b", 9)]
    assert fill_buckets(sizes, 5) == ((1, 2), (0, 3), (4,))


class Noted:
    def __init__(self, name: str, notes: list[str]) -> None:
        self._name, self._notes = name, notes

    def begin(self) -> None:
        self._notes.append(f"{self._name} begins")

    def give_back(self) -> None:
        self._notes.append(f"{self._name} gives back")

    def start(self) -> None:
        self._notes.append(f"{self._name} starts")

    def finish(self, settled: Callable[[], None]) -> None:
        self._notes.append(f"{self._name} ends")


def test_reductions_start_in_one_order_as_soon_as_they_may() -> None:
    notes: list[str] = []
    parts = [(Noted("a", notes), {1, 2}), (Noted("b", notes), {3}), (Noted("c", notes), ())]
    queue = ReductionQueue(parts, lambda: None)
    with queue.reducing():
        for what in (3, 1):
            queue.ready(what)
        notes.append("work")
        queue.ready(2)
        notes.append("work")
    assert notes[3:] == ["work", "a starts", "b starts", "work", "c starts"] + [
        f"{name} ends" for name in "abc"
    ]


def test_after_an_error_gradients_are_given_back() -> None:
    notes: list[str] = []
    queue = ReductionQueue([(Noted("a", notes), ())], lambda: None)
    with pytest.raises(ZeroDivisionError), queue.reducing():
        _ = 1 / len(notes[1:])
    assert notes == ["a begins", "a gives back"]
    assert not queue.open


# --- the norm of all gradients --------------------------------------------------------------------


def with_gradient(gradient: Tensor | None) -> nn.Parameter:
    if gradient is None:
        return nn.Parameter(torch.zeros(1))
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def rounded_once(gradients: list[Tensor]) -> float:
    numbers = [x for each in gradients for x in each.double().flatten().tolist()]
    return math.sqrt(math.fsum(x * x for x in numbers))


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e18, 1e-38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sum_is_exact_wherever_it_is_cut(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(5, 7), torch.randn(300) * 1e-5, torch.zeros(3), torch.randn(0)]
    gradients = [(each * scale).to(dtype) for each in gradients]
    parameters = [*map(with_gradient, gradients), with_gradient(None)]
    expected = rounded_once(gradients)
    assert norm_of(sum_of_squares(parameters)) == expected
    apart = sum(sum_of_squares([each]) for each in reversed(parameters))
    assert isinstance(apart, Tensor)
    assert norm_of(apart) == expected
    rows = sum(sum_of_squares([with_gradient(row)]) for each in gradients for row in each)
    assert isinstance(rows, Tensor)
    assert norm_of(rows) == expected


def test_more_numbers_than_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_norm, "_AT_ONCE", 64)
    monkeypatch.setattr(exact_norm, "_EXACT", 100)
    gradients = [torch.randn(200), torch.randn(50), torch.randn(50).double(), torch.randn(63)]
    found = norm_of(sum_of_squares(map(with_gradient, gradients)))
    assert found == rounded_once(gradients)


@pytest.mark.parametrize(
    ("numbers", "norm"),
    [
        ([], 0.0),
        ([1.0, math.inf], math.inf),
        ([1.0, -math.inf, math.nan], math.nan),
        ([-math.nan], math.nan),
        ([1e200, 1.0], math.inf),
        ([1.3e154] * 3, math.inf),
        ([1e153] * 3, math.sqrt(math.fsum([1e153**2] * 3))),
        ([1e-160] * 3, math.sqrt(math.fsum([1e-160**2] * 3))),
    ],
)
def test_what_is_no_number_or_too_large(numbers: list[float], norm: float) -> None:
    found = norm_of(sum_of_squares([with_gradient(torch.tensor(numbers, dtype=torch.float64))]))
    assert found == norm or (math.isnan(found) and math.isnan(norm))


# torch 2.11 says so of every sum of a sparse tensor.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_and_complex_gradients() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([2.0, 1.0]), (4,), check_invariants=True
    )
    assert norm_of(sum_of_squares([with_gradient(sparse)])) == 3.0
    assert norm_of(sum_of_squares([with_gradient(torch.tensor([3.0 + 4.0j]))])) == 5.0
