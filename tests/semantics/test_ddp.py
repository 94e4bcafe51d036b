"""DistributedDataParallel around a split module: the reducer runs in ``backward_weight()``."""

from __future__ import annotations

import pytest
from semantics.ddp_workers import errors, refusal

from autosplit.pipeline import launch

PATTERNS = ["every microbatch", "all at once", "no_sync, weights inside", "no_sync, weights late"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_same_as_without_splitting(pattern: str) -> None:
    for found in launch(errors, 2, (pattern,), timeout=60):
        assert max(found) < 1e-6


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("find_unused_parameters", "use find_unused_parameters=False"),
        ("static_graph", "use static_graph=False"),
        ("count", "everything pending must come together"),
        ("no backward", r"whose backward() has not run"),
    ],
)
def test_refused(option: str, text: str) -> None:
    for found in launch(refusal, 2, (option,), timeout=60):
        assert text in found
