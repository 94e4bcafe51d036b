"""torchtitan's Llama over two ranks, with its own stages and with ours."""

from __future__ import annotations

import pytest

from autosplit.pipeline import launch
from tests.examples.torchtitan_workers import CASES, compared


def test_torchtitan_trains_with_split_stages() -> None:
    """torchtitan is no dependency: run with torchtitan 0.2.2 on the path."""
    pytest.importorskip("torchtitan.protocols.train_spec", exc_type=ImportError)
    results = launch(compared, 2, timeout=300)
    for result in results:
        assert [*result] == [*CASES]
        for ours, theirs, different in result.values():
            assert ours == theirs
            assert different == []
    assert all(loss for loss, _, _ in results[-1].values())
