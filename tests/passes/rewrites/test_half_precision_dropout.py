"""dropout: the backward rounds its noise as autograd's does, in half precision on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit.passes.rewrites.peephole import half_precision_dropout
from autosplit.passes.verify import verify
from tests.passes.graphs import ops, program_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_the_steps_of_autograd(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, dtype=dtype, requires_grad=True)
    program = program_of(nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.Dropout(0.1)), x)
    assert ops(program.joint)["native_dropout_backward"] == 1
    assert half_precision_dropout(program)
    assert ops(program.joint)["native_dropout_backward"] == 0
    verify(program)
    assert not half_precision_dropout(program)


def test_float_stays_one_operator() -> None:
    program = program_of(nn.Dropout(0.1), torch.randn(2, 3, requires_grad=True))
    assert not half_precision_dropout(program)
