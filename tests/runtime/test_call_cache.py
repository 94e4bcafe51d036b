"""The bound of a cache of calls."""

from __future__ import annotations

from autosplit.runtime.call_cache import MAX_CALLS, CallCache


def test_all_calls_are_forgotten_beyond_the_bound() -> None:
    cache = CallCache[int, str]()
    for key in range(MAX_CALLS):
        assert cache.remember(key, "first") == "first"
    cache.remember(3, "second")
    assert len(cache) == MAX_CALLS
    cache.remember(MAX_CALLS, "third")
    assert cache == {MAX_CALLS: "third"}
