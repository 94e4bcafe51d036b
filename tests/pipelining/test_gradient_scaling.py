"""Division of a step's gradients."""

from __future__ import annotations

import torch
from torch import nn

from autosplit.pipelining.step import StepGradients


def test_a_step_that_did_not_end_is_undone_by_the_next() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    gradients = StepGradients()
    for after, expected in ((torch.ones(1), 3.0), (None, None)):
        parameter.grad = torch.full((1,), 2.0)
        gradients.begin([parameter])
        parameter.grad = after
        gradients.abandon()
        assert (None if parameter.grad is None else parameter.grad.item()) == expected
