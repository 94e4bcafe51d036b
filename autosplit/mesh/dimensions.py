"""The dimensions of a DeviceMesh: which ranks run one pipeline, and which are its replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autosplit.errors import PipelineError

PIPELINE, REPLICATE, SHARD, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"

DIMENSIONS = {
    PIPELINE: "the stages of one pipeline",
    REPLICATE: "replicas of it, each with its own share of the batch",
    SHARD: "parameters sharded by fully_shard",
    TENSOR: "parameters sharded by parallelize_module",
}
"""The dimensions that are known, with what lies along each."""

_UNSUPPORTED = {
    SHARD: "stages of fully_shard go into autosplit.split or SplitPipelineStage one at a time",
    TENSOR: "stages of parallelize_module go into autosplit.split or SplitPipelineStage one at a "
    "time",
}
"""Known dimensions along which a trainer does nothing yet, with what to do instead."""


@dataclass(frozen=True)
class RankLayout:
    """Which ranks a trainer connects, and how.

    Attributes:
        pipelines: for each replica its ranks, by pipeline rank; the same on all ranks.
        replica: which of the pipelines this rank is in.
        device_type: of the mesh, such as "cpu"; empty without one.
    """

    pipelines: tuple[tuple[int, ...], ...]
    replica: int = 0
    device_type: str = ""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> RankLayout:
        """The layout that a mesh describes.

        Raises:
            PipelineError: no mesh, dimensions without names or with unknown ones, or other ranks
                than those of the default process group.
        """
        names = _names(mesh)
        ranks = mesh.mesh.tolist()
        _check_ranks(_flat(ranks), names, mesh.shape)
        order = sorted(range(len(names)), key=lambda at: names[at] == PIPELINE)
        table = mesh.mesh.permute(*order)
        length = table.shape[-1] if PIPELINE in names else 1
        rows = table.reshape(-1, length).tolist()
        pipelines = tuple(tuple(row) for row in rows)
        own = dist.get_rank()
        replica = next(number for number, row in enumerate(pipelines) if own in row)
        return cls(pipelines, replica, mesh.device_type)

    @classmethod
    def alone(cls, ranks: int) -> RankLayout:
        """One pipeline, of all ranks of the default process group or of one process."""
        return cls((tuple(range(ranks)),))

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks of this rank's pipeline, by pipeline rank."""
        return self.pipelines[self.replica]

    @property
    def replicas(self) -> int:
        """How many pipelines train one model."""
        return len(self.pipelines)

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """For each pipeline rank the ranks that hold its stages, one of each replica."""
        return [*zip(*self.pipelines, strict=True)]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(sorted(rank for row in self.pipelines for rank in row))


def known_dimensions() -> str:
    """The names that a dimension may have, with what they are for."""
    return ", ".join(f"{name!r} ({what})" for name, what in DIMENSIONS.items())


def _names(mesh: Any) -> tuple[str, ...]:
    if not isinstance(mesh, DeviceMesh):
        raise PipelineError(
            f"mesh is a DeviceMesh of torch.distributed.device_mesh; got a {type(mesh).__name__}"
        )
    names = mesh.mesh_dim_names
    if not names:
        raise PipelineError(
            f"the dimensions of the mesh of {tuple(mesh.shape)} ranks have no names: "
            f"init_device_mesh(..., mesh_dim_names=(...)) of {known_dimensions()}"
        )
    for name in names:
        if name not in DIMENSIONS:
            raise PipelineError(
                f"mesh dimension {name!r} is not supported; those that are: {known_dimensions()}"
            )
    for name, size in zip(names, mesh.shape, strict=True):
        if name in _UNSUPPORTED and size > 1:
            raise PipelineError(
                f"mesh dimension {name!r} of {size} ranks: PipelineTrainer does nothing along it; "
                f"{_UNSUPPORTED[name]}. It takes 'pp' and 'dp_replicate', in any order"
            )
    return tuple(names)


def _check_ranks(ranks: Sequence[int], names: Sequence[str], shape: Sequence[int]) -> None:
    world = dist.get_world_size()
    if sorted(ranks) != [*range(world)]:
        said = ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))
        raise PipelineError(
            f"the mesh ({said}) is of {math.prod(shape)} ranks, {sorted(ranks)}, and the process "
            f"group has {world}, 0 to {world - 1}: a mesh is of all of them, each once"
        )


def _flat(nested: Any) -> list[int]:
    if isinstance(nested, int):
        return [nested]
    return [rank for each in nested for rank in _flat(each)]
