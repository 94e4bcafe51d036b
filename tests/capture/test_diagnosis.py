"""The line that an error of tracing names."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.capture.forward_graph import capture_forward
from autosplit.errors import CaptureError


class ReadsAFile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + os.path.exists("switch")


def test_an_error_names_the_users_line_not_one_of_pythons_library() -> None:
    line = f"{__file__}:{ReadsAFile.forward.__code__.co_firstlineno + 1}"
    split = autosplit.split(ReadsAFile())
    split(torch.ones(2, requires_grad=True)).sum().backward()
    assert f"{os.path.basename(__file__)}:{line.rpartition(':')[2]}" in split.report()
    with pytest.raises(CaptureError, match=rf"at {re.escape(line)}\n"):
        capture_forward(ReadsAFile(), (torch.ones(2),), {})
