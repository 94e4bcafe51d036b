"""Batches are told apart by their values."""

from __future__ import annotations

import pytest
import torch

from autosplit.pipeline.training.batches import digest


@pytest.mark.parametrize("shape", [(), (3, 2), (2048, 1024), (1, 3_000_000), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_equal_values_have_equal_digests(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.zeros(shape, dtype=dtype)
    assert digest(values) == digest(values.clone())
    if values.numel():
        assert digest(values) != digest(values + 1 if dtype is not torch.bool else ~values)


def test_layout_does_not_count() -> None:
    values = torch.randn(4, 6, dtype=torch.complex64)
    assert digest(values.t().contiguous().t()) == digest(values)
    assert digest(values.conj()) == digest(values.conj().resolve_conj())
    expanded = torch.ones(1, 3).expand(4, 3).requires_grad_()
    assert digest(expanded) == digest(torch.ones(4, 3))
