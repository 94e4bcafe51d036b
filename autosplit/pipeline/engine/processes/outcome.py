"""How a rank's process ended, and which of several ends is the cause of the others."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autosplit.errors import AutosplitError
from autosplit.pipeline.engine.faults.first_error import RankError, describe_error
from autosplit.pipeline.engine.faults.rank_process import ended

# What Gloo says when the other end is gone; a rank that says so suffers from another's failure.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "Broken pipe",
)


@dataclass(frozen=True, slots=True)
class Success:
    """What a rank's function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a rank that gave no result.

    Attributes:
        report: the whole story, naming the rank.
        when: seconds since the epoch.
        consequence: True when the rank failed because another one had.
        died: the rank, where its process died without a word.
        tells_of: the rank that it tells of, where that is another one, which died, left or hangs.
        error: what the rank's function raised, where that is typed and can be sent.
    """

    report: str
    when: float
    consequence: bool
    died: int | None = None
    tells_of: int | None = None
    error: AutosplitError | None = None

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> Failure:
        """For a rank whose function raised."""
        if isinstance(error, RankError):
            # The same text on all ranks, so it does not matter whose is shown.
            fault = error.fault
            of = fault.rank if fault.ended else None
            return cls(fault.report, time.time(), fault.lost, tells_of=of)
        text = "".join(traceback.format_exception(error)).rstrip()
        consequence = any(each in str(error) for each in _CONSEQUENCES)
        report = f"rank {rank} failed: {describe_error(error)}\n{text}"
        return cls(report, time.time(), consequence, error=_sendable(error))

    @classmethod
    def of_death(cls, rank: int, status: int | None) -> Failure:
        """For a rank whose process died without a word."""
        report = f"rank {rank} {'ended' if status is None else ended(status)}"
        if status is None or status >= 0:
            report += " and no result"
        if status == 1:  # Python's own, before there was anybody to report
            report += (
                ", for the reason that it printed; if that is about bootstrapping: each rank "
                "imports the script that calls launch(), which must do so under "
                "if __name__ == '__main__':"
            )
        return cls(report, time.time(), False, died=rank)


def _sendable(error: BaseException) -> AutosplitError | None:
    """A typed error, if it is the same once it has been pickled."""
    if not isinstance(error, AutosplitError):
        return None
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the error, or what it refers to, raises of its own
        return None
    return error if type(copy) is type(error) and str(copy) == str(error) else None


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The earliest failure that is not the consequence of another one; else the earliest. Of a
    death, what another rank tells says more.
    """
    first = min(failures, key=lambda failure: (failure.consequence, failure.when))
    told = (each for each in failures if first.died is not None and each.tells_of == first.died)
    return next(told, first)
