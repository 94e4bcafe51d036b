"""Example inputs of another size."""

from __future__ import annotations

import pytest
import torch

from autosplit.cli.plan import resized
from autosplit.errors import PlanError


def test_samples_are_repeated_or_cut() -> None:
    mask, inputs = torch.ones(5, 5), torch.arange(6).reshape(3, 2)
    (more, same, name), kwargs = resized(((inputs, mask, "a"), {"labels": inputs[:, 0]}), 4)
    assert more.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert kwargs["labels"].tolist() == [0, 2, 4, 0]
    assert same is mask
    assert name == "a"
    assert resized((inputs,), 1)[0].tolist() == [[0, 1]]


def test_inputs_without_samples() -> None:
    with pytest.raises(PlanError, match="no tensor with samples along dimension 0"):
        resized((torch.tensor(1.0), "a"), 4)


def test_inputs_that_no_machine_has_room_for_are_refused() -> None:
    with pytest.raises(PlanError, match=r"of 1,000,000,000,000 samples take .* GiB, more"):
        resized(torch.zeros(2, 8), 10**12)
