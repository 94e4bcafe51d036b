"""``OverlappedReduction``: parameter groups are reduced while weight gradients are computed."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from torch import Tensor

from autosplit.torch_internals.fsdp import ParameterGroup

from .module import ShardedModule


class OverlappedReduction:
    """Reduces each group as soon as the last of its gradients is there, the groups in one order on
    all ranks: one that is complete too early for that order waits for those before it.

    On an accelerator FSDP reduces on a stream of its own. On a CPU a thread waits for the other
    ranks that hold the shards; nothing else may communicate with these meanwhile.

    Args:
        sharded: the module.
        gathered: the parameters, gathered, whose gradients are to come.
    """

    def __init__(self, sharded: ShardedModule, gathered: Iterable[Tensor]) -> None:
        self._sharded = sharded
        awaited = {id(parameter) for parameter in gathered}
        self._groups = sharded.reduced_groups
        self._missing = [awaited & {id(whole) for _, whole in g.pairs} for g in self._groups]
        self._begun: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1) if sharded.blocks else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Reduce what is left, and wait; after an error only wait."""
        if error is None:
            for missing in self._missing:
                missing.clear()
            self._start()
        if self._thread is not None:
            self._thread.shutdown()
        for each in self._begun:
            if error is None or each.exception() is None:
                each.result()
        if error is None:
            self._sharded.finish_reduce()

    def arrived(self, gathered: Iterable[Tensor]) -> None:
        """The gradients of these parameters are in ``.grad``."""
        keys = {id(parameter) for parameter in gathered}
        for missing in self._missing:
            missing -= keys
        self._start()

    def _start(self) -> None:
        while len(self._begun) < len(self._groups) and not self._missing[len(self._begun)]:
            group = self._groups[len(self._begun)]
            group.lay_gradients_out()
            if self._thread is None:
                future: Future[None] = Future()
                _reduce(group)
                future.set_result(None)
            else:
                future = self._thread.submit(_reduce, group)
            self._begun.append(future)


def _reduce(group: ParameterGroup) -> None:
    group.accumulate()
    if group.unreduced:
        group.start_reduce()
