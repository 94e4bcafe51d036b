"""Train/eval modes of modules, and bytes of storages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit.torch_internals.state import distinct_storage_bytes, modes_kept


def run_for_evaluation(model: nn.Module) -> None:
    with modes_kept([model]):
        model.eval()
        assert not any(part.training for part in model.modules())
        raise KeyError


def test_modes_of_submodules_are_restored_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with pytest.raises(KeyError):
        run_for_evaluation(model)
    assert [part.training for part in model.modules()] == [True, True, False]


def test_views_share_their_storage() -> None:
    whole, other = torch.zeros(4, 2), torch.zeros(3)
    assert distinct_storage_bytes([whole[0], whole.t(), None, other[:1]]) == 4 * (4 * 2 + 3)
