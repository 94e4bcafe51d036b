"""Which faults happen where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PLACES = ("build", "compile", "F", "I", "W", "optimizer", "loader")
ANYWHERE = ("kill", "stop", "raise", "exit", "sleep")
LAUNCHERS = ("launch", "torchrun")
RANKS = (2, 4)

# Faults that end nothing by themselves: the others wait out their timeout.
SILENT = ("stop", "sleep")

# What the others must say besides the rank.
CAUSES = {
    "kill": ("killed by SIGKILL",),
    "stop": ("has not answered for",),
    "raise": ("ValueError: bad weather",),
    "exit": ("exited with status 3",),
    "sleep": ("has been in",),
    "leave": ("came to the end of its program", "dropped its trainer"),
    "starve": ("closed its trainer",),
}


@dataclass(frozen=True)
class Cell:
    """One fault of rank 1 of ``ranks``, in its second step if it has come to steps.

    Attributes:
        fault: what: killed by a signal, stopped by one, an error, ``os._exit``, a long sleep, the
            return of its function, or the end of its batches.
        place: where: while it builds or compiles its stages, in an F, I or W, in the optimizer's
            step, or between steps.
        ranks: how many there are.
        launcher: what started them.
    """

    fault: str
    place: str
    ranks: int
    launcher: str

    @property
    def name(self) -> str:
        return f"{self.launcher} {self.ranks} {self.fault} {self.place}"

    @property
    def victim(self) -> int:
        """The rank that it happens to."""
        return 1


def cells() -> Iterator[Cell]:
    """All of them."""
    for launcher in LAUNCHERS:
        for ranks in RANKS:
            for fault in CAUSES:
                for place in places_of(fault):
                    yield Cell(fault, place, ranks, launcher)


def places_of(fault: str) -> tuple[str, ...]:
    """Where a fault can happen: code that is called by others cannot leave."""
    return PLACES if fault in ANYWHERE else ("loader",)
