"""The norm of all gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autosplit.mesh import exact_norm
from autosplit.mesh.exact_norm import norm_of, sum_of_squares


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
