"""The bound of a memory of calls."""

from __future__ import annotations

from autosplit.runtime.call_memory import MAX_CALLS, CallMemory


def test_all_calls_are_forgotten_beyond_the_bound() -> None:
    memory = CallMemory[int, str]()
    for key in range(MAX_CALLS):
        assert memory.remember(key, "first") == "first"
    memory.remember(3, "second")
    assert len(memory) == MAX_CALLS
    memory.remember(MAX_CALLS, "third")
    assert memory == {MAX_CALLS: "third"}
