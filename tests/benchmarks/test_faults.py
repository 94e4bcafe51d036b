"""Some of the faults that ``benchmarks.faults`` tries: all ranks end, and say who and why."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from benchmarks.faults.cells import Cell
from benchmarks.faults.judge import Finding, judge, names
from tests.interpreters import rank_processes

CELLS = (Cell("kill", "compile", 3, "launch"),)


def judged(cell: Cell, pipe: Connection) -> None:
    """Run a cell in a process of its own, whose ranks begin with what it has imported."""
    fork = multiprocessing.get_context("fork")
    launching = sys.modules["autosplit.ranks.launch"]
    launching.get_context = lambda method: fork  # type: ignore[attr-defined]
    try:
        pipe.send(judge(cell, timeout=4.0))
    except BaseException:
        pipe.send(traceback.format_exc())


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, tuple[BaseProcess, Connection]]]:
    """All cells at the same time: most of theirs is waiting."""
    started: dict[str, tuple[BaseProcess, Connection]] = {}
    context = rank_processes()
    try:
        for cell in CELLS:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=judged, args=(cell, theirs))
            process.start()
            theirs.close()
            started[cell.name] = process, ours
        yield started
    finally:
        for process, ours in started.values():
            process.join(10)
            process.kill()
            process.join()
            ours.close()


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_survivor_names_rank_and_cause(
    cell: Cell, running: dict[str, tuple[BaseProcess, Connection]]
) -> None:
    result = running[cell.name][1].recv()
    assert isinstance(result, Finding), result
    assert result.wrong == []
    assert result.alive == 0
    assert result.left == []
    assert result.named == cell.ranks - 1
    assert result.told is True


def test_a_message_without_rank_or_cause_is_none() -> None:
    cell = Cell("kill", "F", 4, "launch")
    assert names(cell, "rank 1 was killed by SIGKILL in the forward and backward")
    assert not names(cell, "rank 2 was killed by SIGKILL in the forward and backward")
    assert not names(cell, "rank 0 lost rank 1 (was a process killed?)")
