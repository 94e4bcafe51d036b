"""Memory bands: the bytes of each rank over one step, and how they are recorded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from autosplit.pipeline.engine.timing import SpanRecorder
from autosplit.pipeline.schedule.schedule import Action
from autosplit.pipeline.simulation.simulate import Span
from autosplit.text.figures import size_text
from autosplit.torch_internals.allocations import Stretch, allocations_on
from autosplit.torch_internals.pytree import tree_flatten
from autosplit.torch_internals.state import distinct_storage_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Band:
    """The most bytes that a rank held during one action, or between two actions.

    Attributes:
        start: seconds, on the clock of the step's timeline.
        end: seconds, on the clock of ``start``.
        during: the action, such as ``"0F1"``; empty between two actions.
        fixed: bytes of parameters, buffers, gradients and optimizer state, which do not depend on
            the schedule. New gradients count from the beginning of the action that computes them.
        activations: bytes of everything else: the batch, microbatches, messages, and an action's
            inputs, outputs and workspace.
    """

    start: float
    end: float
    during: str
    fixed: int
    activations: int

    @property
    def total(self) -> int:
        """Fixed and activation bytes together."""
        return self.fixed + self.activations


@dataclass(frozen=True)
class StepMemory:
    """The memory of each rank during forward and backward of one step, in bytes.

    A rank never held more than the sum of ``fixed`` and ``peak_activations``. ``fixed`` has all
    gradients, although they are computed during the step. The workspace of the optimizer step is
    not included.

    Attributes:
        peak_activations: by rank, the peak of all memory that is not fixed, with kernel workspace.
            Empty for a step that has not run.
        predicted: by rank, the same peak, computed from graphs, messages and schedule; None for a
            rank with a stage whose memory cannot be predicted.
        fixed: by rank, bytes of parameters, buffers, gradients and optimizer state.
        bands: by rank, the bands in order of time. Empty for a step that has not run.
        limits: by rank, the trainer's ``memory_limit``; empty without a limit.
    """

    peak_activations: tuple[int, ...]
    predicted: tuple[int | None, ...]
    fixed: tuple[int, ...]
    bands: tuple[tuple[Band, ...], ...]
    limits: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, rows: Sequence[tuple[Sequence[Band], int | None]], limits: tuple[int, ...] = ()
    ) -> StepMemory:
        """Build the memory of a step from each rank's (bands, predicted peak)."""
        return cls(
            tuple(max(band.activations for band in bands) for bands, _ in rows),
            tuple(predicted for _, predicted in rows),
            tuple(bands[-1].fixed for bands, _ in rows),
            tuple(tuple(bands) for bands, _ in rows),
            limits,
        )

    def __str__(self) -> str:
        """Text with a line for each rank, and whether the limit was kept."""
        lines = []
        for rank, peak in enumerate(self.peaks):
            text = "unknown" if peak is None else size_text(peak)
            limit = f" of at most {size_text(self.limits[rank])}" if self.limits else ""
            lines.append(f"rank {rank}: {text}{limit}")
        if self.limit_kept is not None:
            lines.append(f"memory_limit: {'kept' if self.limit_kept else 'not kept'}")
        return "\n".join(lines)

    @property
    def peaks(self) -> tuple[int | None, ...]:
        """The most bytes that each rank held at once, or is predicted to hold in a step that has
        not run.
        """
        if self.bands:
            return tuple(max(band.total for band in bands) for bands in self.bands)
        pairs = zip(self.predicted, self.fixed, strict=True)
        return tuple(None if peak is None else peak + fixed for peak, fixed in pairs)

    @property
    def limit_kept(self) -> bool | None:
        """Whether no rank held more than its limit; None without a limit, or if a peak is not
        known.
        """
        if not self.limits or None in self.peaks:
            return None
        return all(peak <= limit for peak, limit in zip(self.peaks, self.limits, strict=True))  # type: ignore[operator]

    def left(self, rank: int) -> int:
        """Bytes of activations at the end of the step minus the bytes at its beginning. If a rank
        leaks memory, the number is positive in every step.
        """
        bands = self.bands[rank]
        return bands[-1].activations - bands[0].activations


Holdings = Callable[["Iterable[Tensor]"], "tuple[int, int]"]
"""Takes tensors to which only the next action refers. Returns the bytes that are fixed now, and the
bytes of all tensors.
"""


def state_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The parameters and buffers of modules."""
    return [t for module in modules for t in (*module.parameters(), *module.buffers())]


@dataclass(frozen=True)
class _Moment:
    when: float
    during: str  # the action that begins now
    fixed: int
    level: int
    beside: int  # the most bytes of other threads since the last mark, above their bytes then


class MemoryRecorder(SpanRecorder):
    """Records times and memory of one step.

    The recorder sets a mark where an action starts or ends. ``holdings`` gives the bytes at a mark;
    the allocator and ``beside`` give the changes after the mark.

    Args:
        times: the recorder of times.
        holdings: a function that returns the bytes that tensors hold now.
        device: the device of the stages. On an accelerator, the allocator's peak statistics are
            reset at every action.
        beside: a function that returns the most bytes that other threads have held since its last
            call, above the bytes at that call; None without such threads. Moves allocate and
            release tensors in threads of their own, which the profiler of this thread does not see.
    """

    def __init__(
        self,
        times: SpanRecorder,
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
        """Context that records allocations; enter it around the step, and around any part of the
        step that runs again.
        """
        with self._allocations:
            yield
        self._stretches = self._allocations.stretches()[self._first :]

    def begin(self) -> None:
        self._moments = []  # before the first of them is marked
        self._first = self._look("")
        self._times.begin()

    def run(self, actions: Sequence[Action], compute: Callable[[], T]) -> T:
        self._look(str(actions[0]), _arguments_of(compute))
        result = self._times.run(actions, compute)
        self._look("")
        return result

    def note(self, spans: Iterable[Span]) -> None:
        """Add the spans of moves, which ran beside computation."""
        self._times.note(spans)

    def finish(self, results: Iterable[Tensor]) -> None:
        """End the step. The bytes of ``results`` do not count, because they belong to the
        caller.
        """
        self._results = distinct_storage_bytes(results)
        self._look("")

    def spans(self) -> list[Span]:
        return self._times.spans()

    def bands(self) -> list[Band]:
        """The bands of the step, from the instant before the step to the instant after it."""
        moments, stretches = self._moments, self._stretches
        first, last = moments[0], moments[-1]
        bases = [first.level] * len(moments)
        if self._elsewhere is not None:
            starts = [0, *(stretch.end for stretch in stretches)]
            bases = [moment.level - level for moment, level in zip(moments, starts, strict=False)]
        bands = [Band(first.when, first.when, "", first.fixed, first.level - first.fixed)]
        for now, following, stretch, base in zip(
            moments, moments[1:], stretches, bases, strict=False
        ):
            fixed = max(now.fixed, following.fixed)
            most = base + stretch.highest + following.beside - fixed
            bands.append(Band(now.when, following.when, now.during, fixed, max(most, 0)))
        end = stretches[len(moments) - 2].end  # after the last mark, the step is over
        results = 0 if self._elsewhere is not None else self._results
        rest = max(bases[-1] + end - results - last.fixed, 0)
        return [*bands, Band(last.when, last.when, "", last.fixed, rest)]

    def _look(self, during: str, arguments: Iterable[Tensor] = ()) -> int:
        # Read the past maximum first: an allocation in between is then counted twice, not never.
        beside = 0 if self._elsewhere is None else self._elsewhere()
        self._moments.append(
            _Moment(time.perf_counter(), during, *self._holdings(arguments), beside)
        )
        return self._allocations.mark()


def _arguments_of(compute: Callable[[], object]) -> list[Tensor]:
    """The tensors that a call got from other ranks. They have left their mailbox, and are freed at
    their last use: keep no reference to them.
    """
    # Received tensors are in a list. The other arguments are microbatches, stages and functions.
    arguments = compute.args if isinstance(compute, partial) else ()
    lists = [argument for argument in arguments if isinstance(argument, list)]
    return [leaf for leaf in tree_flatten(lists)[0] if isinstance(leaf, Tensor)]
