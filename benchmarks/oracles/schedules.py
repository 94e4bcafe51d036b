"""Every schedule by name for up to 8 stages and microbatches, in every form, as CSV."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from autosplit.errors import ScheduleError
from autosplit.pipeline import SCHEDULES, Schedule, build

COUNTS = range(1, 9)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"split_backward": False},
    "2bp": {"weights": "2bp"},
    "fill": {"weights": "fill"},
    "timed": {"times": (1.0, 0.5, 1.5)},
}
"""Options by the name of a form."""


def cases() -> Iterator[tuple[str, str]]:
    """Each schedule as text, or why it is refused."""
    for name, stages, form in product(SCHEDULES, COUNTS, FORMS):
        for microbatches, ranks in product(COUNTS, (None, *range(1, stages + 1))):
            options = {**FORMS[form], "ranks": ranks}
            case = f"{name}/{form}/N{stages}/M{microbatches}/P{ranks or ''}"
            try:
                text = written(build(name, stages, microbatches, **options))
            except ScheduleError as error:
                text = f"refused: {error}"
            yield case, text
    for name, microbatches in product(SCHEDULES, COUNTS):
        uneven = [(1.0, 0.0, 2.0), *[(1.0, 1.5, 0.5 + stage / 4) for stage in range(1, 4)]]
        if SCHEDULES[name].weights and not refused(name, 4, microbatches):
            yield (
                f"{name}/uneven/N4/M{microbatches}",
                written(build(name, 4, microbatches, times=uneven)),
            )


def refused(name: str, stages: int, microbatches: int) -> bool:
    """Whether a schedule does not admit these counts."""
    try:
        build(name, stages, microbatches)
    except ScheduleError:
        return True
    return False


def written(schedule: Schedule) -> str:
    """All that a schedule says, a line each, then its rows."""
    said = (
        f"placement {schedule.placement} partners {schedule.partners}",
        f"split {schedule.split_backward} crosses {schedule.crosses_step} {dict(schedule.moved)}",
        *(",".join(map(str, row)) for row in schedule.ranks),
    )
    return "\n".join([schedule.name, *said])
