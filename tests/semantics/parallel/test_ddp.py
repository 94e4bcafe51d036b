"""DistributedDataParallel around a split module: a backward that synchronises is a whole one."""

from __future__ import annotations

from tests.ranks import Ranks
from tests.semantics.parallel.ddp_workers import OPTIONS, PATTERNS, WAYS, all_errors, all_options


def test_same_as_without_splitting(on_ranks: Ranks) -> None:
    for rank in on_ranks(all_errors, 2, timeout=100):
        assert len(rank) == len(PATTERNS) * len(WAYS)
        for case, found in rank.items():
            assert max(found) < 1e-6, case


def test_same_under_every_option(on_ranks: Ranks) -> None:
    """Also where a parameter is unused in a step, and without a call that computes weights."""
    for rank in on_ranks(all_options, 2, timeout=60):
        assert len(rank) == len(OPTIONS)
        for option, found in rank.items():
            assert max(found) < 1e-6, option
