"""Schedules that move what microbatches hold come to the same as those that do not."""

from __future__ import annotations

import operator
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.errors import OutputError, PipelineError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.moves import Moves, PartnerMemory
from autosplit.pipeline.engine.offload_target import OffloadFile
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.trainer import tuning
from tests.kept_ranks import Ranks, ranks
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.workers import WIDTH, Tied, block, data, equal, trainer
from tests.trainer.late_transfers import late_transfers
from tests.trainer.moving import SAVED, awaiting, evicting, offloading, recomputing

OWN: dict[str, Any] = {"stage_factory": None, "timeout": 60.0}
PLAIN: dict[str, Any] = {}
"""What comes of schedules as they were."""


def layers(index: int) -> nn.Module:
    """A stage that draws random numbers and writes into buffers."""
    torch.manual_seed(index)
    return nn.Sequential(
        nn.Linear(WIDTH, 3 * WIDTH),
        nn.BatchNorm1d(3 * WIDTH),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(3 * WIDTH, WIDTH),
    )


def first_frozen(index: int) -> nn.Module:
    return layers(index).requires_grad_(index > 0)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def results(schedule: Schedule, model: Any = layers, **options: Any) -> dict[str, Any]:
    """Whatever comes of a step, of two whose gradients add up, and of an evaluation."""
    batches = [data(4 * schedule.microbatches, seed=step) for step in range(3)]
    torch.manual_seed(11 + rank())
    options = {**OWN, **options}
    count = schedule.microbatches
    with trainer(model, schedule.stages, count, schedule=schedule, **options) as engine:
        return {
            "losses": [engine.step(batches[0]), *map(engine.forward_backward, batches[1:])],
            "gradients": {
                stage: {name: grad.clone() for name, grad in grads.items()}
                for stage, grads in engine.gradients().items()
            },
            "evaluated": engine.evaluate(batches[0]),
            "states": engine.state_dict(),
            "held": [
                (stage.saved_bytes, stage.deferred_bytes)
                for stage in engine.stages.values()
                if hasattr(stage, "saved_bytes")  # not a frozen one
            ],
        }


def assert_same(
    schedule: Schedule, change: Callable[[Schedule], Schedule], model: Any = layers, **options: Any
) -> None:
    """A changed schedule comes to the same, bit for bit."""
    changed = change(schedule)
    assert any(action.kind.is_memory for row in changed.ranks for action in row)
    key = str((schedule, model, options))
    if key not in PLAIN:
        PLAIN[key] = results(schedule, model, **options)
    expected, result = PLAIN[key], results(changed, model, **options)
    assert not [key for key in expected if not equal(expected[key], result[key])]


def both(schedule: Schedule) -> Schedule:
    return evicting(schedule, range(len(schedule.ranks)))


GPIPE, LATE = build("gpipe", 2, 4), build("1f1b", 2, 4, weights="2bp")
CASES: dict[str, tuple[Any, ...]] = {
    "offload awaited": (GPIPE, lambda schedule: awaiting(offloading(schedule))),
    "evict awaited": (LATE, lambda schedule: awaiting(evicting(schedule))),
    "recompute": (GPIPE, lambda s: offloading(recomputing(s), [("I", "W")])),
    "chunks, whole backward": (
        build("interleaved", 4, 4, ranks=2, split_backward=False),
        both,
    ),
    "tied": (GPIPE, both, Tied),
    "frozen": (GPIPE, both, first_frozen),
}


@pytest.mark.parametrize("case", CASES)
@ranks(2)
def test_the_same_bit_for_bit(case: str) -> None:
    tied = {"shared_parameters": [[(0, "tied"), (1, "tied")]]} if case == "tied" else {}
    assert_same(*CASES[case], **tied)


@ranks(4)
def test_four_ranks() -> None:
    late = build("1f1b", 4, 8, weights="2bp")
    assert_same(late, lambda schedule: recomputing(evicting(schedule, [0, 1], [("I", "W")])), block)


def test_all_in_one_process() -> None:
    assert_same(build("zb-v", 2, 4, ranks=1), offloading, ranks=1)


@ranks(2)
def test_the_timeline_holds_what_all_ranks_ran() -> None:
    """Moves, too."""
    schedule = evicting(build("gpipe", 2, 3))
    with trainer(layers, 2, 3, schedule=schedule, record=True, **OWN) as engine:
        engine.step(data(12))
        timeline = engine.timeline()
        spans = timeline.spans
        assert engine.metrics()["idle"] == timeline.bubble_ratio(engine.rank)
    for at, row in enumerate(schedule.ranks):
        local = [str(span.action) for span in spans if span.rank == at]
        assert sorted(local) == sorted(map(str, row))
        ran = [span.action for span in spans if span.rank == at and span.action.kind.is_compute]
        assert ran == [action for action in row if action.kind.is_compute]
    assert all(span.start < span.end for span in spans)


@ranks(2)
def test_a_storage_travels_once_and_no_parameter_does() -> None:
    """Nor does the batch, of which the microbatches are parts: all that its rows make travels."""
    sent: list[list[Tensor]] = []
    announce = PartnerMemory.announce

    def noted(store: PartnerMemory, storages: Any) -> None:
        sent.append(list(storages))
        announce(store, storages)

    schedule = evicting(build("gpipe", 2, 3), away=[SAVED])
    with (
        mock.patch.object(PartnerMemory, "announce", noted),
        trainer(layers, 2, 3, schedule=schedule, **OWN) as engine,
    ):
        engine.step(data(12))
    assert len(sent) == 3 * (rank() == 0)
    wide, narrow = (
        4 * 4 * 18,
        4 * 18,
    )  # of float32: a layer of 4 rows, a statistic (as large: a mask)
    for storages in sent:
        assert len({storage.untyped_storage().data_ptr() for storage in storages}) == len(storages)
        size = sum(storage.numel() for storage in storages)
        assert size == 3 * (wide + narrow)


@ranks(2)
def test_the_link_to_the_store_is_measured() -> None:
    """The same on both ranks, as both search with it."""
    with trainer(layers, 2, 3, schedule=offloading(build("gpipe", 2, 3)), **OWN) as engine:
        engine.step(data(12))
        link = engine.store_link()
        results: list[Any] = [None, None]
        dist.all_gather_object(results, link)
    assert results[0] == results[1]
    assert link.bandwidth > 0
    with trainer(layers, 2, 3, schedule=evicting(build("gpipe", 2, 3)), **OWN) as engine:
        engine.step(data(12))
        with pytest.raises(PipelineError, match=r"^no rank has an offload target to measure: the"):
            engine.store_link()


def weighed(limit: int | list[int] | None, microbatches: int = 4) -> tuple[list[Tensor], Any]:
    """Losses of some steps, and the memory of the last."""
    torch.manual_seed(rank())
    options = {"schedule": "gpipe", "memory_limit": limit, "record": "memory", **OWN}
    with trainer(layers, 2, microbatches, **options) as engine:
        losses = [engine.step(data(32 * microbatches)) for _ in range(5)]
        return losses, engine.memory()


@ranks(2)
def test_a_limit_of_memory_changes_no_result() -> None:
    plain, memory = weighed(None)
    most = max(map(sum, zip(memory.peak_activations, memory.fixed, strict=True)))
    limit = int(0.7 * most)
    with late_transfers(0.005):  # which changes no result, and keeps to the limit
        losses, memory = weighed(limit)
    assert all(map(torch.equal, plain, losses))
    kept = [*map(sum, zip(memory.peak_activations, memory.fixed, strict=True))]
    predicted = [*map(sum, zip(memory.predicted, memory.fixed, strict=True))]
    assert max(predicted) <= limit
    # An arrival within an action adds to the action's own peak: one storage at most.
    assert max(kept) <= limit + 32 * 3 * WIDTH * 4


@ranks(2)
def test_each_rank_keeps_to_its_own_limit() -> None:
    _, plain = weighed(None)
    peaks = [*map(sum, zip(plain.predicted, plain.fixed, strict=True))]
    limits = [2 * peaks[0], int(0.8 * peaks[1])]
    _, memory = weighed(limits)
    predicted = [*map(sum, zip(memory.predicted, memory.fixed, strict=True))]
    assert all(map(operator.le, predicted, limits))
    assert memory.limits == tuple(limits)
    assert memory.limit_kept == all(map(operator.le, memory.peaks, limits))
    assert str(memory).startswith("rank 0: ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_limit": ["1GiB"] * 3}, "memory_limit has 3 limits for 2 ranks of the pipeline"),
        (
            {"memory_limit": ["1GiB", 1024]},
            r"within 1,073,741,824 / 1,024 bytes; the most frugal .* memory_limit=\[1073741824, ",
        ),
        ({"memory_limit": "1 KiB"}, "memory_limit: no schedule was found within 1,024 bytes; the"),
        ({"memory_limit": "12 GiBs"}, "expected memory_limit such as 80GiB"),
        (
            {"memory_limit": "1GiB", "split_backward": False},
            "memory_limit searches a schedule with separate I and W, and chooses",
        ),
        ({"store": "/tmp"}, r"store='/tmp' has no effect: schedule '1f1b' offloads nothing"),
        (
            {"store": "/missing", "schedule": offloading(build("gpipe", 2, 3))},
            "no file for offloaded tensors can be created in .*missing",
        ),
    ],
    ids=[
        "three limits",
        "little for one rank",
        "too little",
        "no bytes",
        "whole backwards",
        "nothing to store",
        "no folder",
    ],
)
@ranks(2)
def test_limits_and_stores_of_no_use_are_refused(options: dict[str, Any], said: str) -> None:
    with (
        pytest.raises((PipelineError, OutputError), match=said),
        trainer(layers, 2, 3, **OWN, **options) as engine,
    ):
        engine.step(data(12))


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("pwrite", r"rank 0 failed in 0OFFLOAD\d: PipelineError: .* offloaded to a file .*Input/o"),
        ("preadv", r"rank 0 failed in 0RELOAD\d: PipelineError: tensors that were .* are lost: In"),
    ],
)
@ranks(2)
def test_every_rank_hears_what_became_of_a_store(call: str, said: str) -> None:
    """On one rank, in the second microbatch."""
    real, calls = getattr(os, call), []

    def fail(*args: Any) -> Any:
        calls.append(1)
        if rank() == 0 and len(calls) > 5:
            raise OSError(5, "Input/output error")
        return real(*args)

    with (
        mock.patch.object(os, call, fail),
        pytest.raises(PipelineError, match=said),
        trainer(layers, schedule=offloading(GPIPE), **OWN) as engine,
    ):
        [*map(engine.step, [data(16)] * 2)]


def test_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    put = OffloadFile.put

    def put_late(store: OffloadFile, data: Tensor) -> Any:
        time.sleep(0.3)
        return put(store, data)

    monkeypatch.setattr(OffloadFile, "put", put_late)
    schedule = offloading(build("gpipe", 2, 4, ranks=1))
    options = {**OWN, "schedule": schedule, "timeout": 0.1}
    with trainer(layers, 2, ranks=1, **options) as engine:
        with pytest.raises(PipelineError, match="rank 0 failed in 0OFFLOAD0") as caught:
            engine.step(data(16))
        message = "0OFFLOAD0 did not finish on this host within 0.1 s"
        assert message in str(caught.value)


STEPS, BAD = 5, 2  # the number of steps, and the one that fails


def limited_steps(folder: Path, first: int, *, dying: bool = False) -> list[Tensor]:
    """Steps from one on within a limit; a checkpoint is made before the one that goes wrong."""

    def name(stage: int, parameter: str) -> str:
        return f"{stage}.{parameter}"

    torch.manual_seed(5 + rank())
    options = {**OWN, "memory_limit": "1GiB", "schedule": "gpipe", "timeout": 20.0}
    with trainer(layers, **options) as engine:
        losses = []
        if first:
            load_checkpoint(engine, folder, names=name)
        for step in range(first, STEPS):
            if dying and step == BAD:
                save_checkpoint(engine, folder, names=name)
                mock.patch.object(Moves, "_receive", receive_and_die).start()
            losses.append(engine.step(data(16, seed=step)))
        return losses


RECEIVE = Moves._receive


def receive_and_die(moves: Moves, left: Any, arrived: list[Tensor], store: Any) -> None:
    RECEIVE(moves, left, arrived, store)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def partner_dies(folder: Path) -> None:
    """Kill rank 1 while it holds evicted tensors of rank 0, which writes down its error."""
    result = evicting(GPIPE)
    with mock.patch.object(tuning, "search_within", return_value=result):
        try:
            limited_steps(folder / "last", 0, dying=True)
        except Exception as error:
            (folder / "heard").write_text(f"{type(error).__name__} {error}")
            raise


def resumed(folder: Path) -> bool:
    """Whether a run resumed after its partner died has the losses of an undisturbed one."""
    plain = limited_steps(folder, 0)
    return all(map(torch.equal, plain[BAD:], limited_steps(folder / "last", BAD)))


def test_a_partner_that_dies_with_what_it_holds(tmp_path: Path, on_ranks: Ranks) -> None:
    how = "rank 1 (was killed by SIGKILL|ended without a word)"  # the latter once it is reaped
    with pytest.raises(PipelineError, match=how):
        on_ranks(partner_dies, 2, (tmp_path,), timeout=60)
    assert re.match(f"RankError {how}", (tmp_path / "heard").read_text())
    assert on_ranks(resumed, 2, (tmp_path,), timeout=60) == [True, True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (offloading, "0OFFLOAD0 is scheduled, but the tensors of stage 0 cannot be moved"),
        (recomputing, "0F0 is scheduled with a RECOMPUTE, but stage 0 cannot run its"),
    ],
)
def test_stages_of_others_that_cannot(change: Any, said: str) -> None:
    schedule = change(build("gpipe", 2, 4, ranks=1))
    with (
        trainer(stages=2, schedule=schedule, ranks=1, stage_factory=ReferenceStage) as engine,
        pytest.raises(PipelineError, match=said),
    ):
        engine.step(data(8))
