"""Memory bands: what each rank holds over one step, by owner, and how that is recorded: how much
from the allocator, whose from its holders.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from autosplit.errors import AutosplitError
from autosplit.pipeline.engine.timing import Recorder
from autosplit.pipeline.schedule.action import Action
from autosplit.pipeline.simulation.timeline import Span
from autosplit.torch_internals.allocations import Stretch, allocations_on
from autosplit.torch_internals.state import distinct_storage_bytes, storage_sizes

T = TypeVar("T")

FIXED = ("parameters", "gradients", "optimizer state")
"""Owners of what a rank holds whatever its schedule: buffers count as parameters."""

OWNERS = (*FIXED, "batch", "saved", "deferred", "in transit", "working")
"""Owners in the order in which they are drawn.

``batch``: its inputs and targets. ``saved``: of microbatches between F and their backward.
``deferred``: between I and W. ``in transit``: buffers of messages, sends under way, and what waits
for a stage of the same rank. ``working``: all else, which is the action's own: what it takes, makes
and needs in between.
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


Source = Callable[[], Iterable[Tensor | None]]


class BytesByOwner:
    """Who holds what on one rank.

    A storage counts once, for the first of its owners in the order of ``OWNERS``.

    Args:
        sources: for owners, a call that gives the tensors that they hold now. Those of an owner
            that is not here are never counted.
        constant: owners that hold the same throughout, which are asked once.
    """

    def __init__(self, sources: Mapping[str, Source], constant: Sequence[str] = ()) -> None:
        unknown = [owner for owner in sources if owner not in OWNERS]
        if unknown:
            raise AutosplitError(f"no owner of memory {unknown[0]!r}; known: {', '.join(OWNERS)}")
        self._sources = sources
        self._known = {owner: storage_sizes(sources[owner]()) for owner in constant}

    def now(self) -> dict[str, int]:
        """Bytes by owner."""
        seen: set[tuple[object, int]] = set()
        held = dict.fromkeys(OWNERS, 0)
        for owner in OWNERS:
            sizes = self._known.get(owner)
            if sizes is None:
                source = self._sources.get(owner)
                sizes = {} if source is None else storage_sizes(source())
            for key, size in sizes.items():
                if key not in seen:
                    seen.add(key)
                    held[owner] += size
        return held


def state_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers."""
    return [t for module in modules for t in (*module.parameters(), *module.buffers())]


@dataclass(frozen=True)
class _Moment:
    when: float
    during: str  # what begins here
    held: dict[str, int]
    beside: int  # the most since the moment before, above what there was then


class MemoryRecorder(Recorder):
    """A recorder of times that records memory as well; for one step.

    Args:
        times: records when what ran.
        holdings: who holds what at a moment.
        device: where the stages run. On an accelerator the peak statistics of its allocator are
            reset at every action.
        beside: tells the most bytes that other threads had more, at any time since it was last
            asked, than there were then; None where there are none. Moves allocate and release
            tensors in threads of their own, which on the CPU is not seen in this one: what there
            is at a mark then counts as its holders say, and only what comes and goes behind it as
            the allocator and ``beside`` do.
    """

    def __init__(
        self,
        times: Recorder,
        holdings: BytesByOwner,
        device: torch.device,
        *,
        beside: Callable[[], int] | None = None,
    ) -> None:
        self._elsewhere = beside if device.type == "cpu" else None
        self._times = times
        self._holdings = holdings
        self._allocations = allocations_on(device)
        self._moments: list[_Moment] = []
        self._first = 0
        self._results = 0
        self._stretches: list[Stretch] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around the step, and whatever may be run again of it."""
        with self._allocations:
            yield
        self._stretches = self._allocations.stretches()[self._first :]

    def begin(self) -> None:
        self._moments = []  # before the first of them is marked
        self._first = self._look("")
        self._times.begin()

    def run(self, action: Action, compute: Callable[[], T]) -> T:
        self._look(str(action))
        result = self._times.run(action, compute)
        self._look("")
        return result

    def note(self, spans: Iterable[Span]) -> None:
        """Add what ran beside computation."""
        self._times.note(spans)

    def finish(self, results: Iterable[Tensor]) -> None:
        """The step is over; ``results`` of it are with the caller and nobody's burden."""
        self._results = distinct_storage_bytes(results)
        self._look("")

    def spans(self) -> list[Span]:
        return self._times.spans()

    def bands(self) -> list[Band]:
        """What was held in the step, from the instant before it to the one after it."""
        moments, stretches = self._moments, self._stretches
        bases = [sum(moments[0].held.values())] * len(moments)
        if self._elsewhere is not None:
            before = [0, *(stretch.end for stretch in stretches)]
            bases = [
                sum(moment.held.values()) - level
                for moment, level in zip(moments, before, strict=False)
            ]
        found = [_instant(moments[0], bases[0])]
        for here, there, stretch, base in zip(moments, moments[1:], stretches, bases, strict=False):
            found.append(_between(here, there, base + stretch.highest + there.beside))
        end = stretches[len(moments) - 2].end  # behind the last mark is not the step's
        results = 0 if self._elsewhere is not None else self._results
        found.append(_instant(moments[-1], bases[-1] + end - results))
        return found

    def _look(self, during: str) -> int:
        # First what was there until now: what comes in between is rather counted twice than never.
        beside = 0 if self._elsewhere is None else self._elsewhere()
        held = self._holdings.now()
        self._moments.append(_Moment(time.perf_counter(), during, held, beside))
        return self._allocations.mark()


def _instant(moment: _Moment, level: int) -> Band:
    return Band(moment.when, moment.when, "", _with_working(moment.held, level))


def _between(here: _Moment, there: _Moment, level: int) -> Band:
    """Whatever comes or goes in between is nobody's for all of it, but gradients stay."""
    held = {
        owner: (max if owner in FIXED else min)(here.held[owner], there.held[owner])
        for owner in OWNERS
    }
    return Band(here.when, there.when, here.during, _with_working(held, level))


def _with_working(held: dict[str, int], level: int) -> dict[str, int]:
    known = sum(size for owner, size in held.items() if owner != "working")
    return held | {"working": max(level - known, 0)}
