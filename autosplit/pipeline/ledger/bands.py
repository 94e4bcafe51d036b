"""Memory bands: what each rank holds over one step, and how that is recorded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from autosplit.pipeline.engine.timing import Recorder
from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation.simulate import Span
from autosplit.torch_internals.allocations import Stretch, allocations_on
from autosplit.torch_internals.state import distinct_storage_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Band:
    """What a rank held at most during one action, or between two.

    Attributes:
        start: seconds, on the clock of the step's timeline.
        end: likewise.
        during: the action, as ``"0F1"``; empty between two.
        fixed: bytes of parameters, buffers, gradients and optimizer state, which it holds whatever
            its schedule. New gradients count from the beginning of the action that makes them.
        activations: bytes of all else: the batch, microbatches, messages, what an action takes,
            makes and needs in between.
    """

    start: float
    end: float
    during: str
    fixed: int
    activations: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.fixed + self.activations


@dataclass(frozen=True)
class StepMemory:
    """The memory of the forward and backward of one step, in bytes by rank.

    A rank never held more than ``fixed`` and ``peak_activations`` together: gradients count as
    whole in ``fixed``, though they come to be during the step. What an optimizer needs while it
    moves is not in here.

    Attributes:
        peak_activations: the most beside what is fixed at any time, what operators took for
            themselves included. Empty for a step that has not run.
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
            tuple(bands[-1].fixed for bands, _ in rows),
            tuple(tuple(bands) for bands, _ in rows),
        )

    def left(self, rank: int) -> int:
        """By how many bytes activations did not come back to where they began: what the step leaks
        on a rank, if it is there in every step.
        """
        bands = self.bands[rank]
        return bands[-1].activations - bands[0].activations


Holdings = Callable[[], "tuple[int, int]"]
"""What tensors hold now that is fixed, and all of them: bytes."""


def state_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers."""
    return [t for module in modules for t in (*module.parameters(), *module.buffers())]


@dataclass(frozen=True)
class _Moment:
    when: float
    during: str  # what begins here
    fixed: int
    held: int
    beside: int  # the most since the moment before, above what there was then


class MemoryRecorder(Recorder):
    """A recorder of times that records memory as well; for one step.

    Args:
        times: records when what ran.
        holdings: tells what tensors hold at a moment.
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
        holdings: Holdings,
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
        first, last = moments[0], moments[-1]
        bases = [first.held] * len(moments)
        if self._elsewhere is not None:
            before = [0, *(stretch.end for stretch in stretches)]
            bases = [moment.held - level for moment, level in zip(moments, before, strict=False)]
        found = [Band(first.when, first.when, "", first.fixed, first.held - first.fixed)]
        for here, there, stretch, base in zip(moments, moments[1:], stretches, bases, strict=False):
            fixed = max(here.fixed, there.fixed)
            most = base + stretch.highest + there.beside - fixed
            found.append(Band(here.when, there.when, here.during, fixed, max(most, 0)))
        end = stretches[len(moments) - 2].end  # behind the last mark is not the step's
        results = 0 if self._elsewhere is not None else self._results
        rest = max(bases[-1] + end - results - last.fixed, 0)
        return [*found, Band(last.when, last.when, "", last.fixed, rest)]

    def _look(self, during: str) -> int:
        # First what was there until now: what comes in between is rather counted twice than never.
        beside = 0 if self._elsewhere is None else self._elsewhere()
        self._moments.append(_Moment(time.perf_counter(), during, *self._holdings(), beside))
        return self._allocations.mark()
