"""Memory bands: what each rank holds over one step, by owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

FIXED = ("parameters", "gradients", "optimizer state")
"""Owners of what a rank holds whatever its schedule: buffers count as parameters."""

OWNERS = (*FIXED, "batch", "saved", "deferred", "evicted here", "in transit", "working")
"""Owners in the order in which they are drawn.

``batch``: its inputs and targets. ``saved``: of microbatches between F and their backward.
``deferred``: between I and W. ``evicted here``: what the rank keeps for its partner. ``in
transit``: buffers of messages, sends under way, and what waits for a stage of the same rank.
``working``: all else, which is the action's own: what it takes, makes and needs in between.
"""


@dataclass(frozen=True, slots=True)
class Band:
    """What a rank held at most during one action, or between two.

    A microbatch counts as saved or deferred while it waits; during its own action it is
    ``working``. New gradients count as gradients from the beginning of the action that makes them.

    Attributes:
        start: seconds, on the clock of the step's timeline.
        end: likewise.
        during: the action, as ``"0F1"``; empty between two.
        held: bytes by owner.
    """

    start: float
    end: float
    during: str
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self.held.values())

    @property
    def activations(self) -> int:
        """Bytes of all but the fixed owners."""
        return sum(size for owner, size in self.held.items() if owner not in FIXED)


@dataclass(frozen=True)
class StepMemory:
    """The memory of the forward and backward of one step, in bytes by rank.

    A rank never held more than ``fixed`` and ``peak_activations`` together: gradients count as
    whole in ``fixed``, though they come to be during the step. What an optimizer needs while it
    moves is not in here.

    Attributes:
        peak_activations: the most that all but the fixed owners held at any time, what operators
            took for themselves included. Empty for a step that has not run.
        predicted: the same, as graphs, messages and schedule have it; None on a rank with a stage
            of whose memory nothing is known.
        fixed: parameters, buffers, gradients and optimizer state.
        bands: the rank's bands, in order of time; empty likewise.
    """

    peak_activations: tuple[int, ...]
    predicted: tuple[int | None, ...]
    fixed: tuple[int, ...]
    bands: tuple[tuple[Band, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[Band], int | None]]) -> StepMemory:
        """Of the bands of each rank and what was predicted for it."""
        return cls(
            tuple(max(band.activations for band in bands) for bands, _ in rows),
            tuple(predicted for _, predicted in rows),
            tuple(sum(bands[-1].held[owner] for owner in FIXED) for bands, _ in rows),
            tuple(tuple(bands) for bands, _ in rows),
        )

    def left(self, rank: int) -> dict[str, int]:
        """Owners whose bands did not come back to where they began, gradients left out, and by how
        many bytes: what the step leaks on a rank, if it is there in every step.
        """
        first, last = self.bands[rank][0].held, self.bands[rank][-1].held
        grown = {owner: last[owner] - first[owner] for owner in OWNERS if owner != "gradients"}
        return {owner: size for owner, size in grown.items() if size}


def owners_of(bands: Sequence[Sequence[Band]]) -> Iterator[str]:
    """The owners that hold something at any time, in order."""
    for owner in OWNERS:
        if any(band.held[owner] for row in bands for band in row):
            yield owner
