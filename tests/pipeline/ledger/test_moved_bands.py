"""Offloaded activations take no memory until they are reloaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.moves import Moves, TransferredBytes
from autosplit.pipeline.engine.offload_target import OffloadFile
from autosplit.pipeline.engine.timing import recorder_on
from autosplit.pipeline.ledger.bands import Band, MemoryRecorder, StepMemory
from autosplit.pipeline.schedule.schedule import Action
from tests.kept_ranks import Ranks
from tests.pipeline.ledger import workers
from tests.trainer.moving import offloading

Steps = tuple[StepMemory, StepMemory]


@pytest.fixture(scope="module")
def steps(on_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    folder: Path = tmp_path_factory.mktemp("store")
    result, other = on_ranks(workers.stayed_offloaded, 2, (str(folder),), timeout=100.0)
    assert result == other
    steps: Steps = result
    return steps


def test_all_that_leaves_and_comes_is_gone_at_the_end(steps: Steps) -> None:
    for step in steps:
        for rank in range(2):
            assert abs(step.left(rank)) <= 2 * workers.LARGEST  # buffers of messages


def test_offloaded_activations_take_no_memory(steps: Steps) -> None:
    """Deferred tensors stay: at the end of the backwards, a rank holds as much as without."""
    for plain, offloaded in zip(*(step.bands for step in steps), strict=True):
        assert peak(offloaded) <= peak(plain)
        assert peak(offloaded, "F3") < peak(plain, "F3") - workers.LARGEST


def peak(bands: Sequence[Band], action: str = "") -> int:
    """The most bytes of activations during the actions whose names end so."""
    return max(band.activations for band in bands if band.during.endswith(action))


def test_transfers_of_other_threads_add_to_an_action() -> None:
    """Also where it has gone again by the end of the action."""
    cpu, moved = torch.device("cpu"), TransferredBytes()
    kept = [torch.zeros(300, dtype=torch.uint8)]
    recorder = MemoryRecorder(
        recorder_on(0, cpu), lambda _: (0, sum(map(len, kept))), cpu, beside=moved.peak
    )

    def compute() -> int:
        local = torch.zeros(500, dtype=torch.uint8)
        moved.add_bytes(1000)
        moved.add_bytes(-1000)
        kept.append(torch.zeros(40, dtype=torch.uint8))
        moved.add_bytes(40)
        return len(local)

    with recorder.recording():
        recorder.begin()
        moved.add_bytes(7)  # between two actions
        recorder.run((Action.parse("0F0"),), compute)
        recorder.finish([])
    first, between, during, *_ = recorder.bands()
    assert (first.total, between.total) == (300, 307)
    assert during.total == 300 + 500 + 1000 + 40  # whichever came first: at the most
    assert moved.peak() == 0


def test_arguments_that_only_the_call_holds_are_counted() -> None:
    """A received tensor has left its mailbox when the action begins."""
    cpu = torch.device("cpu")
    recorder = MemoryRecorder(
        recorder_on(0, cpu),
        lambda arguments: (0, sum(map(len, arguments))),
        cpu,
        beside=TransferredBytes().peak,
    )
    calls = [partial(len, [torch.zeros(300, dtype=torch.uint8)])]
    with recorder.recording():
        recorder.begin()
        recorder.run((Action.parse("0F0"),), calls.pop())
        recorder.finish([])
    assert [band.total for band in recorder.bands() if band.during] == [300]


@pytest.mark.parametrize("call", ["put", "take"])
def test_storages_are_in_transit_until_they_arrive(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    moves: list[Moves] = []
    begin, real = Moves.begin_step, getattr(OffloadFile, call)
    seen = []

    def note(self: Moves, *args: Any) -> None:
        moves[:] = [self]
        begin(self, *args)

    def look(store: OffloadFile, *args: Any) -> Any:
        seen.append(any(item is args[-1] for item in moves[0].storages_in_transit))
        return real(store, *args)

    monkeypatch.setattr(Moves, "begin_step", note)
    monkeypatch.setattr(OffloadFile, call, look)
    schedule = offloading(build("gpipe", 2, workers.MICROBATCHES, ranks=1))
    with workers.trainer(schedule=schedule, ranks=1) as engine:
        engine.step(workers.batch())
    assert seen
    assert all(seen)


def test_no_rank_holds_more_than_predicted_whatever_transfers_take(
    on_ranks: Ranks, tmp_path: Path
) -> None:
    result, _ = on_ranks(workers.moved_late, 2, (str(tmp_path),), timeout=100.0)
    for step in result:
        for peak, predicted in zip(step.peak_activations, step.predicted, strict=True):
            assert predicted is not None
            # An arrival within an action adds to the action's own peak, whenever either was
            # resident.
            most = predicted + workers.LARGEST
            assert 0 < peak <= most, (step.peak_activations, step.predicted)
