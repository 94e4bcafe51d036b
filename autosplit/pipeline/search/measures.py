"""What can be done to a schedule that holds too much, alone and one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations

from autosplit.pipeline.memory import balance, offload, recompute
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.step_costs import Costs

MEASURES: Mapping[str, Callable[[Schedule, Costs, Sequence[float]], Schedule]] = {
    "balance": balance.nearest,
    "offload": offload.nearest,
    "recompute": recompute.nearest,
}
"""By name."""


def chains(measures: Sequence[str], most: int) -> Iterator[tuple[str, ...]]:
    """Orders in which several measures may be taken, up to so many of them."""
    for length in range(1 if len(measures) == 1 else 2, most + 1):
        for chain in permutations(measures, length):
            # What was run again or sent to the host is not there for a partner to take.
            if "balance" not in chain[1:]:
                yield chain
