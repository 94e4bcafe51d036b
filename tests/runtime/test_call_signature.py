"""Calls taken apart, and what tells them from each other."""

from __future__ import annotations

from autosplit.runtime.specializations import ModuleCall


def test_zeros_of_two_signs_are_told_apart() -> None:
    """They are equal, but ``math.copysign`` of them is not."""
    assert len({ModuleCall.of((value,), {}).signature for value in (0.0, -0.0)}) == 2
    assert len({ModuleCall.of((value,), {}).signature for value in (0j, -0j, 0j.conjugate())}) == 3
