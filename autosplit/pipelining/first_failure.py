"""A rank that fails inside of a step: its neighbours raise too, and say why."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.faults.first_error import Board, Fault, RankError, describe_error
from autosplit.pipeline.engine.messages.process_groups import disconnect


class FirstFailure:
    """Ends a pipeline's steps on all ranks where one rank's step raises.

    The rank leaves its error in the store of the process group and closes its connections to the
    neighbouring stages, which would wait for its messages. Their waits end, they find the error,
    and close theirs. Over other backends than Gloo connections stay open: the neighbours' waits end
    at the group's timeout, and then say the same.

    Args:
        schedule: its name.
        group: of the pipeline; None for all ranks.
        neighbours: global ranks that have a stage next to one of this rank.
    """

    def __init__(
        self, schedule: str, group: dist.ProcessGroup | None, neighbours: Iterable[int]
    ) -> None:
        self._schedule = schedule
        self._group = dist.group.WORLD if group is None else group
        self._neighbours = sorted({*neighbours} - {dist.get_rank()})
        self._ended: Fault | None = None

    def run(self, microbatches: Callable[[], Any], is_told: Callable[[], bool]) -> Any:
        """A step's microbatches.

        Args:
            microbatches: runs them.
            is_told: whether the error that they ended with came before the first of them, while
                stages agreed on shapes: then neighbours know of it, and a next step may go well.

        Raises:
            RankError: another rank failed; with its error and traceback.
            PipelineError: a step has failed before.
            Exception: as it was raised on this rank.
        """
        if self._ended is not None:
            raise PipelineError(
                f"{self._schedule} has ended, as {self._ended.headline}. Its process group has no "
                "connections any more: start anew, from a checkpoint, with new process groups"
            )
        try:
            return microbatches()
        except Exception as error:
            board = self._board()
            fault = None if board is None else board.first()
            if fault is None and is_told():
                raise
            mine = _fault(f"a step of {self._schedule}", error)
            if fault is None:
                fault = mine if board is None else board.post(mine)
            self._end(fault)
            if fault.rank == dist.get_rank():
                raise
            raise RankError(fault.report, fault) from error

    def _board(self) -> Board | None:
        return None if self._group is None else Board(self._group.get_group_store())

    def _end(self, fault: Fault) -> None:
        self._ended = fault
        if self._group is not None and dist.get_backend(self._group) == "gloo":
            for rank in self._neighbours:
                disconnect(self._group, rank)


def _fault(where: str, error: Exception) -> Fault:
    trace = "".join(traceback.format_exception(error))
    return Fault(dist.get_rank(), where, describe_error(error), trace)
