"""Division of a step's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit.pipelining.step import StepGradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1, 3, 4])
def test_new_gradients_are_divided_and_earlier_ones_are_not(
    factor: int, dtype: torch.dtype
) -> None:
    parameter = nn.Parameter(torch.zeros(1000, dtype=dtype))
    earlier = torch.randn(1000).to(dtype)
    added = (torch.randn(1000) * 2.0 ** torch.randint(-24, 4, (1000,))).to(dtype)
    parameter.grad = earlier.clone()
    gradients = StepGradients()
    gradients.begin([parameter])
    parameter.grad = added.clone()
    gradients.scale([parameter], factor)
    assert torch.equal(parameter.grad, earlier + added / factor)


def test_a_step_that_did_not_end_is_undone_by_the_next() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    gradients = StepGradients()
    for after, expected in ((torch.ones(1), 3.0), (None, None)):
        parameter.grad = torch.full((1,), 2.0)
        gradients.begin([parameter])
        parameter.grad = after
        gradients.abandon()
        assert (None if parameter.grad is None else parameter.grad.item()) == expected
