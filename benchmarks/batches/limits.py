"""Two ranks that train on drawn lists under a memory limit: whether each step kept it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosplit.errors import BatchError
from autosplit.pipeline import PipelineTrainer, RunOptions, launch
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.moves import Lane

from ..results import Rows, Target, table
from .lengths import draw
from .model import RANKS, listed, stage
from .settings import Settings

SCHEDULES = ("1f1b", "auto")
PLANNED = [1152] * 4
"""The lengths of the list whose peak with ``1f1b`` is the limit."""
MOST, LONG = 16, 0.1  # microbatches in a list; the share of lists whose texts are twice as long
KEPT = Target("limit kept", at_least=1.0, style=".0%")
KEPT_BY_STORAGES = Target("kept, by storages", at_least=1.0, style=".0%")


class StorageCount(TorchDispatchMode):
    """Counts the bytes of the storages that operators read or return, each as long as it lives.

    Attributes:
        most: the most bytes at once.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._lock = threading.Lock()
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self._add(tensors)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._add(leaf for leaf in tree_leaves((args, kwargs, result)) if type(leaf) is Tensor)
        return result

    def _add(self, tensors: Iterable[Tensor]) -> None:
        with self._lock:
            for tensor in tensors:
                reference = StorageWeakRef(storage := tensor.untyped_storage())
                self._living[reference.cdata] = reference, storage.nbytes()
            self._living = {
                key: entry for key, entry in self._living.items() if not entry[0].expired()
            }
            if sum(size for _, size in self._living.values()) <= self.most:
                return
            self._living = {
                key: (reference, _bytes_now(reference))
                for key, (reference, _) in self._living.items()
            }
            self.most = max(self.most, sum(size for _, size in self._living.values()))


def _bytes_now(reference: StorageWeakRef) -> int:
    """Bytes of a storage; 0 if it is gone, or freed, as that of a message that has arrived."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else int(storage.nbytes())


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each schedule: by step, the most bytes of any rank over the limit, as the trainer
    and as the count of storages say; a refused step has none.
    """
    for schedule in SCHEDULES:
        arguments = schedule, settings.limited_width, settings.steps
        by_rank = launch(_on_rank, RANKS, arguments, timeout=3600.0, threads=1)
        steps = [[*map(max, zip(*rows, strict=True))] for rows in zip(*by_rank, strict=True)]
        yield {"name": f"{RANKS} ranks, {schedule}", "steps": steps}


def _on_rank(schedule: str, width: int, steps: int) -> list[tuple[float, ...]]:
    source, rank = random.Random(0), dist.get_rank()
    with _trainer(width, "1f1b", None) as engine:
        engine.step(microbatches=_parts(PLANNED, rank))
        limit = max(peak for peak in engine.memory().peaks if peak is not None)
    rows: list[tuple[float, ...]] = []
    with _trainer(width, schedule, limit) as engine:
        for _ in range(steps):
            times = 2 if source.random() < LONG else 1
            lengths = [times * length for length in draw(source, source.randint(1, MOST))]
            microbatches = _parts(lengths, rank)
            try:
                most = _most_bytes(engine, microbatches)
            except BatchError:
                rows.append(())
                continue
            peak = engine.memory().peaks[rank] or 0
            rows.append((peak / limit, most / limit))
    return rows


def _most_bytes(engine: PipelineTrainer, microbatches: Sequence[Any]) -> int:
    """The most bytes of storages in the actions of a step."""
    run, carry, counts = Executor.run, Lane.carry, list[StorageCount]()
    modules = nn.ModuleList(engine.modules.values())
    optimizer: Any = engine.optimizer
    state = [t for each in optimizer.state.values() for t in each.values()]

    def counted_run(*args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad for p in modules.parameters() if p.grad is not None]
        held = [*modules.parameters(), *modules.buffers(), *gradients, *state]
        batch = [leaf for leaf in tree_leaves(microbatches) if leaf is not None]
        counts.append(StorageCount([*held, *batch]))
        with counts[-1]:
            return run(*args, **kwargs)

    def counted_carry(lane: Lane, work: Callable[[], Any], **options: Any) -> Any:
        def counted_work() -> Any:
            with counts[-1]:
                return work()

        return carry(lane, counted_work, **options)

    with (
        mock.patch.object(Executor, "run", counted_run),
        mock.patch.object(Lane, "carry", counted_carry),
    ):
        engine.step(microbatches=microbatches)
    return counts[-1].most


def _parts(lengths: Sequence[int], rank: int) -> list[Any]:
    """The microbatches of a list, of which a rank has what its stage takes."""
    return [(x if rank == 0 else None, y if rank > 0 else None) for x, y in listed(lengths)]


def _trainer(width: int, schedule: str, limit: int | None) -> PipelineTrainer:
    return PipelineTrainer(
        lambda index: stage(index, width),
        lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        stages=RANKS,
        microbatches=len(PLANNED),
        schedule=schedule,
        memory_limit=limit,
        run_options=RunOptions(timeout=300.0, record="memory"),
    )


def render(rows: Rows) -> str:
    """The shares of steps that kept the limit, of those that ran."""
    cells = []
    for row in rows:
        run = [step for step in row["steps"] if step]
        recorded, counted = zip(*run, strict=True)
        cells.append(
            [
                row["name"],
                len(run),
                len(row["steps"]) - len(run),
                KEPT.cell(_share_within(recorded)),
                KEPT_BY_STORAGES.cell(_share_within(counted)),
                f"{max(recorded):.3f}",
                f"{max(counted):.3f}",
            ]
        )
    headers = ["", "steps", "refused", KEPT.title, KEPT_BY_STORAGES.title]
    return table([*headers, "most / limit", "most / limit, by storages"], cells)


def _share_within(steps: Sequence[float]) -> float:
    return sum(most <= 1.0 for most in steps) / len(steps)
