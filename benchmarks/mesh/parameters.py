"""Bytes of parameters that a rank holds in a step: ours beside torch's stage under FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from autosplit.pipeline import PipelineTrainer
from autosplit.pipeline.engine.launch import launch
from autosplit.stage import Stage

from ..results import Rows, table
from .beside import BLOCKS, MICROBATCHES, Block

ROWS, WIDTH = 16, 64

LIMIT = 1.05
SCHEDULES = {
    "interleaved": (4, "ScheduleInterleavedZeroBubble"),
    "zb-v": (4, "ScheduleZBVZeroBubble"),
}
_CALLS = ("forward", "backward_input", "backward_weight", "backward")
_TORCHS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def measure(only: str = "") -> Iterator[dict[str, Any]]:
    """A row for each schedule whose name has ``only`` in it."""
    for name in SCHEDULES:
        if only in name:
            found = launch(_on_rank, 4, (name,), timeout=600)
            ours, torchs, between, whole = (max(rank[at] for rank in found) for at in range(4))
            yield {
                "name": name,
                "ours": ours,
                "torch": torchs,
                "between": between,
                "whole": whole,
            }


def _on_rank(name: str) -> tuple[int, int, int, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    stages, kind = SCHEDULES[name]
    ours, between, whole = _ours(mesh, name, stages)
    return ours, _torchs(mesh, kind, stages, name), between, whole


def _sharded(index: int, stages: int, mesh: DeviceMesh, **options: Any) -> nn.Module:
    share = BLOCKS // stages
    module = nn.Sequential(*(Block(at, WIDTH) for at in range(index * share, (index + 1) * share)))
    for block in module:
        fully_shard(block, mesh=mesh["dp_shard"], **options)
    fully_shard(module, mesh=mesh["dp_shard"], **options)
    return module


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def _held(modules: list[nn.Module]) -> int:
    """Bytes of shards, and of what is gathered of them."""
    storages: dict[int, int] = {}
    parts: list[Any] = [part for module in modules for part in module.modules()]
    for part in parts:
        if not isinstance(part, FSDPModule):
            continue
        for group in part._get_fsdp_state()._fsdp_param_groups:
            for each in group.fsdp_params:
                tensors = [each._sharded_param_data, *each.all_gather_outputs]
                for storage in (tensor.untyped_storage() for tensor in tensors):
                    storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class _watching:  # noqa: N801
    """The most that is held behind any call of some classes' methods."""

    def __init__(self, kind: type, names: tuple[str, ...], held: Callable[[], int]) -> None:
        self._kind, self._held = kind, held
        self._calls = {name: getattr(kind, name) for name in names}
        self.most = 0

    def __enter__(self) -> _watching:
        for name, call in self._calls.items():
            setattr(self._kind, name, self._watched(call))
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self._calls.items():
            setattr(self._kind, name, call)

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.most = max(self.most, self._held())
            return result

        return watched


def _ours(mesh: DeviceMesh, name: str, stages: int) -> tuple[int, int, int]:
    with PipelineTrainer(
        functools.partial(_sharded, stages=stages, mesh=mesh),
        F.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        stages=stages,
        microbatches=MICROBATCHES,
        schedule=name,
        mesh=mesh,
    ) as trainer:
        modules = [*trainer.modules.values()]
        with _watching(Stage, _CALLS, lambda: _held(modules)) as watch:  # before they are looked up
            trainer.step(_batch())
            watch.most = 0
            trainer.step(_batch())
        whole = sum(p.numel() * p.element_size() for m in modules for p in m.parameters())
        return watch.most, _held(modules), whole


def _torchs(mesh: DeviceMesh, kind: str, stages: int, name: str) -> int:
    rank, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
    mine = [rank, stages - 1 - rank] if name == "zb-v" else [rank, rank + 2]
    modules = [_sharded(index, stages, mesh, reshard_after_forward=False) for index in mine]
    made = [
        PipelineStage(module, index, stages, torch.device("cpu"), group=group)
        for index, module in zip(mine, modules, strict=True)
    ]
    schedule = getattr(schedules, kind)(made, MICROBATCHES, loss_fn=F.mse_loss)
    inputs, targets = _batch()
    given = {"target": targets} if stages - 1 in mine else {}
    args = (inputs,) if 0 in mine else ()
    schedule.step(*args, **given)
    with _watching(_PipelineStageBase, _TORCHS, lambda: _held(modules)) as watch:
        schedule.step(*args, **given)
    return watch.most


def render(rows: Rows) -> str:
    cells = []
    for row in rows:
        ratio = row["ours"] / row["torch"]
        text = f"{ratio:.3f}"
        cells.append(
            [
                row["name"],
                f"{row['ours']:,}",
                f"{row['torch']:,}",
                text if ratio <= LIMIT else f"**{text}**",
                f"{row['between']:,}",
                f"{row['whole']:,}",
            ]
        )
    headers = ["schedule", "bytes at most", "torch's", "ratio", "between steps", "all, whole"]
    return table(headers, cells)
