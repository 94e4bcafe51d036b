"""Training under schedules that move what microbatches hold, for spawned processes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit import PipelineError
from autosplit.checkpoint import load_checkpoint, save_checkpoint
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.host_store import HostFileStore
from autosplit.pipeline.engine.moves import PartnerLink
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.training import memory_limit as limited_schedule
from tests.pipeline.training.late_transfers import late_transfers
from tests.pipeline.training.moving import SAVED, awaiting, evicting, offloading, recomputing
from tests.pipeline.training.parameter_workers import Tied
from tests.pipeline.workers import WIDTH, data, equal, outcomes, trainer

LATE = {"weights": "2bp"}
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


def _first_frozen(index: int) -> nn.Module:
    return layers(index).requires_grad_(index > 0)


def results(schedule: Schedule, model: Any = layers, **options: Any) -> dict[str, Any]:
    """Whatever comes of a step, of two whose gradients add up, and of an evaluation."""
    rows = 4 * schedule.microbatches
    batches = [data(rows, seed=step) for step in range(3)]
    torch.manual_seed(11 + dist.get_rank() if dist.is_initialized() else 11)
    options = {"stage_factory": None, **options}
    count = schedule.microbatches
    with trainer(model, schedule.stages, count, schedule=schedule, **options) as engine:
        found: dict[str, Any] = {"losses": [engine.step(batches[0])]}
        found["losses"] += [engine.forward_backward(batch) for batch in batches[1:]]
        found["gradients"] = {
            stage: {name: grad.clone() for name, grad in grads.items()}
            for stage, grads in engine.gradients().items()
        }
        found["evaluated"] = engine.evaluate(batches[0])
        found["states"] = engine.state_dict()
        found["held"] = {
            index: (stage.saved_bytes, stage.deferred_bytes)
            for index, stage in engine.stages.items()
            if hasattr(stage, "saved_bytes")
        }
    return found


def same(
    schedule: Schedule, change: Callable[[Schedule], Schedule], model: Any = layers, **options: Any
) -> str:
    """Whether a changed schedule comes to the same, bit for bit."""
    changed = change(schedule)
    count = sum(action.kind.is_memory for action in changed.ranks[_rank()])
    if not count and not any(a.kind.is_memory for row in changed.ranks for a in row):
        return "nothing was changed"
    key = str((schedule, model, options))
    if key not in PLAIN:
        PLAIN[key] = results(schedule, model, **options)
    expected, found = PLAIN[key], results(changed, model, **options)
    wrong = [key for key in expected if not equal(expected[key], found[key])]
    return "the same" if not wrong else f"other {wrong}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _both(schedule: Schedule) -> Schedule:
    return evicting(schedule, range(len(schedule.ranks)))


def _part(schedule: Schedule) -> Schedule:
    """Of the first stage no more than 500 bytes travel."""
    return replace(evicting(schedule), moved={0: 500})


def recorded() -> tuple[list[tuple[str, bool]], bool]:
    """The moves of a step on the timeline, whether each ended behind its start; and whether the
    computations are there as without.
    """
    schedule = evicting(build("gpipe", 2, 3))
    rows: list[list[str]] = []
    for each in (build("gpipe", 2, 3), schedule):
        with trainer(
            layers, 2, 3, schedule=each, stage_factory=None, record=True, timeout=60.0
        ) as engine:
            engine.step(data(12))
            spans = engine.timeline().spans
        rows.append(sorted(str(s.action) for s in spans if s.action.kind.is_compute))
    moves = sorted(
        (f"{span.rank} {span.action}", span.start < span.end)
        for span in spans
        if span.action.kind.is_move
    )
    return moves, rows[0] == rows[1]


def travelled() -> dict[str, list[int]]:
    """How many storages, and bytes, a rank sent to its partner, for each eviction and return."""
    sent: dict[str, list[int]] = {}
    send = PartnerLink.send

    def counting(link: PartnerLink, storages: list[Tensor], what: str) -> Any:
        pointers = {tensor.untyped_storage().data_ptr() for tensor in storages}
        total = sum(tensor.numel() for tensor in storages)
        sent[f"{what} {len(sent)}"] = [len(storages), len(pointers), total]
        return send(link, storages, what)

    schedule = evicting(build("gpipe", 2, 3), away=[SAVED])
    with (
        mock.patch.object(PartnerLink, "send", counting),
        trainer(layers, 2, 3, schedule=schedule, stage_factory=None) as engine,
    ):
        engine.step(data(12))
    return sent


def costs() -> list[Any]:
    """What a trainer measures of its moves and stores, and what one without stores says."""
    gpipe = build("gpipe", 2, 3)
    found: list[Any] = []
    for change in (offloading, evicting):
        with trainer(layers, 2, 3, schedule=change(gpipe), stage_factory=None) as engine:
            engine.step(data(12))
            try:
                found.append(engine.store_costs())
            except PipelineError as error:
                found.append(str(error))
    return found


def two_ranks() -> dict[str, Any]:
    gpipe, late = build("gpipe", 2, 4), build("1f1b", 2, 4, **LATE)
    interleaved = build("interleaved", 4, 4, ranks=2)
    return {
        "offload": same(gpipe, offloading),
        "offload awaited": same(gpipe, lambda schedule: awaiting(offloading(schedule))),
        "evict awaited": same(late, lambda schedule: awaiting(evicting(schedule))),
        "evict both ways": same(late, _both),
        "evict in part": same(gpipe, _part),
        "recompute and offload": same(
            gpipe, lambda schedule: offloading(recomputing(schedule), [("I", "W")])
        ),
        "whole backward": same(build("gpipe", 2, 4, split_backward=False), _both),
        "chunks evicted": same(interleaved, _both),
        "tied": same(gpipe, _both, Tied, shared_parameters=[[(0, "tied"), (1, "tied")]]),
        "frozen": same(gpipe, _both, _first_frozen),
        "recorded": recorded(),
        "travelled": travelled(),
        "costs": costs(),
    }


def four_ranks() -> dict[str, Any]:
    late = build("1f1b", 4, 8, **LATE)
    return {
        "evict": same(build("zb-h1", 4, 8), _both),
        "all at once": same(
            late, lambda schedule: recomputing(evicting(schedule, [0], [("I", "W")]))
        ),
    }


def _weighed(model: Any, limit: int | None, microbatches: int = 8) -> tuple[list[Tensor], Any, int]:
    """Losses of some steps, the memory of the last, and how many moves and repeats are in one."""
    torch.manual_seed(dist.get_rank())
    options: dict[str, Any] = {"stage_factory": None, "record": "memory", "timeout": 60.0}
    batch = data(32 * microbatches)
    with trainer(model, 2, microbatches, schedule="gpipe", memory_limit=limit, **options) as engine:
        losses = [engine.step(batch) for _ in range(7)]
        moves = sum(a.kind.is_memory for row in engine.schedule.ranks for a in row)
        return losses, engine.memory(), moves


def limited() -> dict[str, Any]:
    """Steps within limits that the plain schedule does not keep, and limits of no use."""
    found: dict[str, Any] = {}
    for name, model, share in (("layers", layers, 0.7),):
        plain, memory, _ = _weighed(model, None)
        most = max(map(sum, zip(memory.peak_activations, memory.fixed, strict=True)))
        limit = int(share * most)
        with late_transfers(0.005):  # which changes no result, and keeps to the limit
            losses, memory, moves = _weighed(model, limit)
        held = [*map(sum, zip(memory.peak_activations, memory.fixed, strict=True))]
        predicted = [*map(sum, zip(memory.predicted, memory.fixed, strict=True))]
        found[name] = {
            "plain": most,
            "limit": limit,
            "held": held,
            "predicted": predicted,
            "moves": moves,
            "same": all(map(torch.equal, plain, losses)),
        }
    return found | outcomes(
        {
            # The least limit is searched for, which takes the longer the more microbatches.
            "below": lambda: _step(2, memory_limit="1 KiB"),
            "unit": lambda: _step(memory_limit="12 GiBs"),
            "whole": lambda: _step(memory_limit="1GiB", split_backward=False),
        }
    )


def _step(microbatches: int = 4, **options: Any) -> None:
    with trainer(layers, 2, microbatches, stage_factory=None, timeout=60.0, **options) as engine:
        engine.step(data(4 * microbatches))


# --- what goes wrong ------------------------------------------------------------------------------


def _run(change: Callable[[Schedule], Schedule], **options: Any) -> None:
    schedule = change(build("gpipe", 2, 4))
    options = {"stage_factory": None, "timeout": 60.0, **options}
    with trainer(layers, 2, 4, schedule=schedule, **options) as engine:
        for _ in range(2):
            engine.step(data(16))


def _on_rank_0(error: OSError, call: str) -> Callable[[], None]:
    """A store whose disk does this on one rank, in the second microbatch."""
    real = getattr(os, call)
    calls = []

    def fail(*args: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == 0 and len(calls) > 5:
            raise error
        return real(*args)

    def run() -> None:
        with mock.patch.object(os, call, fail):
            _run(offloading)

    return run


def _cut_short() -> None:
    put = HostFileStore.put

    def put_and_cut(store: HostFileStore, data: Tensor) -> Any:
        ticket = put(store, data)
        os.ftruncate(store._file, 0)
        return ticket

    with mock.patch.object(HostFileStore, "put", put_and_cut):
        _run(offloading)


def faults(folder: Path) -> dict[str, tuple[str, str]]:
    return outcomes(
        {
            "full": _on_rank_0(OSError(28, "No space left on device"), "pwrite"),
            "lost": _on_rank_0(OSError(5, "Input/output error"), "preadv"),
            "cut short": _cut_short,
            "no folder": lambda: _run(offloading, store=folder / "missing"),
            "no effect": lambda: _run(lambda schedule: schedule, store=folder),
        }
    )


# --- what goes wrong within a limit, and the run that goes on from its checkpoint -----------------

_STEPS = 5
_BAD = 2  # the step in which it goes wrong


def _within(change: Callable[[Schedule], Schedule]) -> Any:
    """A search that finds this, whatever the limit."""
    found = SimpleNamespace(schedule=change(build("gpipe", 2, 4)))
    return mock.patch.object(limited_schedule, "search_within", return_value=found)


def _limited_steps(
    folder: Path, first: int, wrong: Callable[[], Any] = contextlib.nullcontext
) -> list[Tensor]:
    """Steps from one on; a checkpoint is made before the one in which something goes wrong."""
    torch.manual_seed(5 + dist.get_rank())
    batches = [data(16, seed=step) for step in range(_STEPS)]
    options: dict[str, Any] = {"stage_factory": None, "memory_limit": "1GiB", "schedule": "gpipe"}
    with trainer(layers, 2, 4, timeout=20.0, **options) as engine:
        losses = []
        if first:
            load_checkpoint(engine, folder, names=_names)
        for step in range(first, _STEPS):
            bad = step == _BAD and wrong is not contextlib.nullcontext
            if bad:
                save_checkpoint(engine, folder, names=_names)
            with wrong() if bad else contextlib.nullcontext():
                losses.append(engine.step(batches[step]))
        return losses


def _names(stage: int, name: str) -> str:
    return f"{stage}.{name}"


def _failing(call: str, number: int) -> Callable[[], Any]:
    """A disk of which rank 0's calls fail."""
    real = getattr(os, call)

    def fail(*args: Any) -> Any:
        if dist.get_rank() == 0:
            raise OSError(number, os.strerror(number))
        return real(*args)

    return lambda: mock.patch.object(os, call, fail)


def _slow() -> Any:
    real = os.pwrite

    def late(*args: Any) -> int:
        time.sleep(0.005)
        return real(*args)

    return mock.patch.object(os, "pwrite", late)


def restarted(folder: Path) -> dict[str, Any]:
    """Per fault of the store, what this rank heard, and whether the run went on as without it."""
    plain = _limited_steps(folder, 0)
    found: dict[str, Any] = {}
    with _within(offloading):
        for name, wrong in (
            ("full", _failing("pwrite", errno.ENOSPC)),
            ("slow", _slow),
        ):
            checkpoint = folder / name
            try:
                losses = _limited_steps(checkpoint, 0, wrong)
                heard = "nothing"
            except Exception as error:
                heard, losses = str(error), [*plain[:_BAD], *_limited_steps(checkpoint, _BAD)]
            found[name] = heard, all(map(torch.equal, plain, losses))
    return found


def resumed(folder: Path) -> bool:
    """Whether a run goes on from where its partner died as one to which nothing happened."""
    plain = _limited_steps(folder, 0)
    return all(map(torch.equal, plain[_BAD:], _limited_steps(folder / "last", _BAD)))


def partner_dies(folder: Path) -> None:
    """Rank 1 is killed while it holds what rank 0 evicted; rank 0 writes down what it hears."""
    receive = PartnerLink.receive

    def receive_and_die(link: PartnerLink, sizes: Any, what: str, found: list[Tensor]) -> None:
        receive(link, sizes, what, found)
        if "ACCEPT" in what:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying() -> Any:
        return mock.patch.object(PartnerLink, "receive", receive_and_die)

    with _within(evicting):
        try:
            _limited_steps(folder / "last", 0, dying)
        except Exception as error:
            (folder / "heard").write_text(f"{type(error).__name__} {error}")
            raise
