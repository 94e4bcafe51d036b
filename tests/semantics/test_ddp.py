"""DistributedDataParallel around a split module: the reducer runs in ``backward_weight()``."""

from __future__ import annotations

from semantics.ddp_workers import PATTERNS, WAYS, all_errors, refusals

from autosplit.pipeline import launch


def test_same_as_without_splitting() -> None:
    for rank in launch(all_errors, 2, timeout=100):
        assert len(rank) == len(PATTERNS) * len(WAYS)
        for case, found in rank.items():
            assert max(found) < 1e-6, case


REFUSED = {
    "find_unused_parameters": "use find_unused_parameters=False",
    "static_graph": "use static_graph=False",
    "count": "everything pending must come together",
    "no backward": r"whose backward() has not run",
}


def test_refused() -> None:
    for rank in launch(refusals, 2, tuple(REFUSED), timeout=60):
        for found, text in zip(rank, REFUSED.values(), strict=True):
            assert text in found
