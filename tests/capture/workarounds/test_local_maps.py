"""A capture does not import ``local_map`` to find out that a callable is not its wrapper."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from autosplit import split

_MODULE = "torch.distributed.tensor.experimental._func_map"


def test_local_map_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    split(nn.Sequential(nn.Linear(3, 3)), backend="eager")(torch.randn(2, 3))
    assert _MODULE not in sys.modules
