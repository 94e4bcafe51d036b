"""A step by NCCL's rules with a delay a message, beside the simulator's with the same delays.

``python -m tests.strict_group.delays`` prints both for every schedule. Stages sleep, so that the
ranks need no cores of their own; a quiet machine is needed all the same.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from tabulate import tabulate

from autosplit.errors import ScheduleError
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.transfer import Transfer
from benchmarks.pipeline.standin import Case, batch_of, makespans, trainer_of

from .group import over

RANKS, STEPS = 4, 3
SECONDS = (0.06, 0.06, 0.06)
DELAY = 0.02  # each message's, which holds up what is behind it in its queue
TARGET = 1.05


def cases(ranks: int) -> list[Case]:
    """Every schedule that so many ranks and as many microbatches allow."""
    found = []
    for name, family in SCHEDULES.items():
        stages = ranks * (family.chunks or 2)
        try:
            schedule = build(name, stages, ranks, ranks=ranks)
        except ScheduleError:  # wants more microbatches than ranks
            schedule = build(name, stages, 2 * ranks, ranks=ranks)
        found.append(Case(name, schedule, SECONDS))
    return found


def measured(given: Sequence[Case], text: str) -> list[float]:
    """Seconds of a step of each case on this rank."""
    with over(text):
        spans = []
        for case in given:
            with trainer_of(case) as trainer:
                spans.append(statistics.median(makespans(trainer, batch_of(case), STEPS)))
        return spans


def main(ranks: int) -> bool:
    """Print the table; whether all are within the target."""
    given = cases(ranks)
    text = f"strict:ms={DELAY * 1000:g}"
    found = launch(measured, ranks, (given, text), timeout=600)[0]
    link = Transfer(bandwidth=1 / DELAY, message_bytes=1.0)
    rows = []
    for case, seconds in zip(given, found, strict=True):
        simulated = simulate(case.schedule, case.costs.seconds, transfer=link).makespan
        rows.append([case.name, 1e3 * simulated, 1e3 * seconds, seconds / simulated])
    headers = ["schedule", "simulated ms", "measured ms", "ratio"]
    print(tabulate(rows, headers, floatfmt=("", ".0f", ".0f", ".3f")))
    return all(1 / TARGET <= row[-1] <= TARGET for row in rows)


if __name__ == "__main__":
    sys.exit(0 if main(int(sys.argv[1]) if sys.argv[1:] else RANKS) else 1)
