"""memory: names and budgets."""

from __future__ import annotations

import pytest

from autosplit.passes import PassError, memory_setting


def test_number_is_a_budget_in_bytes() -> None:
    assert memory_setting(4096).budget == 4096
    assert memory_setting(4096).waiting == 0


@pytest.mark.parametrize("wrong", ["tight", "4096", -1, True, 0.5, None])
def test_unknown(wrong: object) -> None:
    with pytest.raises(PassError, match=r"memory must be 'fast', 'balanced', 'lean', or .*; got"):
        memory_setting(wrong)
