"""Measuring a link takes two processes."""

from __future__ import annotations

import math

from autosplit.planner.links import profile_transfer


def test_a_link_between_two_processes_takes_time() -> None:
    found = profile_transfer()
    assert 0.0 < found.latency < 1.0
    assert 0.0 < found.bandwidth < math.inf
    assert found.message_bytes == 0.0
