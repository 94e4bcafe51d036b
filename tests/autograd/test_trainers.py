"""Programs that know nothing of pending gradients: transformers' Trainer, torch's own split."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input

import autosplit
from autosplit import SplitError
from autosplit.torch_internals import TORCH


def test_torchs_own_split_backward_says_what_it_wants() -> None:
    """It would find no weight, and leave every gradient out."""
    split = autosplit.split(nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises((RuntimeError, SplitError)) as caught:
        stage_backward_input([split(x)], [torch.ones(3, 4)], [x], iter(split.parameters()))
    message = caught.value if TORCH < (2, 12) else caught.value.__cause__
    assert isinstance(message, SplitError)
    assert "dw_builder=autosplit.pipelining.dw_builder(module) to torch's" in str(message)
