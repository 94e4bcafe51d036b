"""The reduce-scatter of a parameter group, among the reductions of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autosplit.pipeline.engine.control import Losing
from autosplit.torch_internals.autograd import has_accumulate_hooks

if TYPE_CHECKING:
    from autosplit.sharded.module import ShardedModule
    from autosplit.torch_internals.fsdp import ParameterGroup

Run = Callable[[Callable[[], None], bool], Callable[[], None]]
"""Starts a call, beside this thread where that may be; gives what waits for its end, and raises
what it raised."""


class StageReductions:
    """The reductions of one stage, which end together.

    Args:
        sharded: the stage.
        run: starts each.
        losing: waits for the other ranks.
    """

    def __init__(self, sharded: ShardedModule, run: Run, losing: Losing) -> None:
        self._sharded = sharded
        self._run = run
        self._losing = losing
        self._waits: list[Callable[[], None]] = []

    def start(self, call: Callable[[], None], *, beside: bool) -> None:
        """Start one of them, behind those that were started before.

        Args:
            call: reduces.
            beside: whether another thread may run it.
        """
        self._waits.append(self._run(call, beside))

    def lay_out(self, group: ParameterGroup) -> None:
        """Reduce what ranks that share its tensors have parts of.

        Raises:
            LostPeerError: one of them did not take part.
        """
        with self._losing("the ranks that share its tensors"):
            group.lay_gradients_out()

    def finish(self) -> None:
        """Wait for all that were started; nothing where that was done.

        Raises:
            LostPeerError: another rank did not take part.
        """
        waits, self._waits = self._waits, []
        if waits:
            with self._losing("the ranks that have the other shards of its parameters"):
                for wait in waits:
                    wait()
                self._sharded.finish_reduce()

    def forget(self) -> None:
        """Wait for none."""
        self._waits = []


class GroupReduction:
    """The reduction of a group's gradients into those of the sharded parameters.

    Args:
        group: the group.
        stage: whose.
        together: the reductions of that stage.

    Attributes:
        timed: whether to note when it starts and ends.
        times: seconds of ``time.perf_counter``, of the last one that was timed.
    """

    def __init__(self, group: ParameterGroup, stage: int, together: StageReductions) -> None:
        self._group = group
        self._together = together
        self.stage: int | None = stage
        self.timed = False
        self.times: tuple[float, float] | None = None
        self._before: list[Tensor | None] = []

    @property
    def parameters(self) -> frozenset[int]:
        """The ``id`` of each sharded parameter that is trained."""
        return frozenset(id(each) for each in self._group.parameters if each.requires_grad)

    def begin(self) -> None:
        """Put the gradients that are there aside."""
        self._before = [each.grad for each in self._group.parameters]
        for each in self._group.parameters:
            each.grad = None

    def give_back(self) -> None:
        """Put back what ``begin`` put aside, in place of what has come since."""
        self._together.forget()
        for each, gradient in zip(self._group.parameters, self._before, strict=True):
            self._group.forget(id(each))
            each.grad = gradient

    def start(self) -> None:
        """Start to reduce what has come, in the parameters as they were gathered."""
        self._together.lay_out(self._group)
        # Hooks are called where a group is reduced.
        hooked = has_accumulate_hooks(self._group.parameters)
        self._together.start(self._reduce, beside=not hooked)

    def finish(self, settled: Callable[[], None]) -> None:
        """Wait, and add what was put aside.

        Raises:
            LostPeerError: another rank did not take part.
        """
        self._together.finish()
        settled()
        for each, earlier in zip(self._group.parameters, self._before, strict=True):
            if earlier is not None:
                with torch.no_grad():
                    each.grad = earlier if each.grad is None else earlier + each.grad
        self._before = []

    def _reduce(self) -> None:
        start = time.perf_counter()
        self._group.accumulate()
        if self._group.unreduced:
            # W of other microbatches, or of another slice, may still read them.
            self._group.start_reduce(reshards=False)
        if self.timed:
            self.times = start, time.perf_counter()
