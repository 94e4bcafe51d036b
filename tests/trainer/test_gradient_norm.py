"""The norm of all gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autosplit.trainer.trained_parameters import GradientNorms


def with_gradient(gradient: Tensor | None) -> nn.Parameter:
    if gradient is None:
        return nn.Parameter(torch.zeros(1))
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def norm_of(*gradients: Tensor | None) -> float:
    return math.sqrt(GradientNorms(map(with_gradient, gradients), squares=True).squares().item())


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e18, 1e-38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sum_is_one_of_float64(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(5, 7), torch.randn(300) * 1e-5, torch.zeros(3), torch.randn(0)]
    gradients = [(gradient * scale).to(dtype) for gradient in gradients]
    numbers = [x for gradient in gradients for x in gradient.double().flatten().tolist()]
    expected = math.sqrt(math.fsum(x * x for x in numbers))
    assert norm_of(*gradients, None) == pytest.approx(expected, rel=1e-12, abs=0.0)


# torch 2.11 says so of every sum of a sparse tensor.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_and_complex_gradients() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([2.0, 1.0]), (4,), check_invariants=True
    )
    assert norm_of(sparse) == 3.0
    assert norm_of(torch.tensor([3.0 + 4.0j])) == 5.0
