"""The dimensions of a DeviceMesh: which ranks run one pipeline, and which are its replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autosplit.errors import PipelineError
from autosplit.text.figures import nearest

PIPELINE, REPLICATE, SHARD, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"
EXPERT, EXPERT_SHARD, CONTEXT = "ep", "efsdp", "cp"

DIMENSIONS = {
    PIPELINE: "the stages of one pipeline",
    REPLICATE: "replicas of it, each with its own share of the batch",
    SHARD: "replicas whose parameters are sharded by fully_shard, each with its own share, too",
    EXPERT: "replicas of all but the experts, of which each has its own, and its own share, too",
    EXPERT_SHARD: f"'dp_shard' of experts; all else is sharded over {EXPERT!r}, too",
    CONTEXT: "replicas, each with its own part of every sequence",
    TENSOR: "parameters sharded by parallelize_module",
}
"""The dimensions that are known, with what lies along each."""

_APART = (
    (EXPERT, TENSOR, ""),
    (EXPERT, CONTEXT, ""),
    (EXPERT, SHARD, f": call that of experts {EXPERT_SHARD!r}"),
)
"""Pairs of dimensions that one mesh may not have together, each with the end of its error text."""


class Place(NamedTuple):
    """Coordinates of a pipeline along all mesh dimensions except "pp"; 0 along a missing
    dimension.
    """

    replicate: int = 0
    shard: int = 0
    tensor: int = 0
    inner: int = 0

    @property
    def share(self) -> tuple[int, ...]:
        """The coordinates that identify the share of the batch that the pipeline runs."""
        return self.replicate, self.shard, self.inner


@dataclass(frozen=True)
class RankLayout:
    """The pipelines of a trainer's ranks, and their coordinates in the mesh.

    Every rank is in one pipeline. Pipelines that differ only along "tp" run the same share of the
    batch, on parts of the tensors.

    Attributes:
        pipelines: the ranks of each pipeline, by pipeline rank; the same on all ranks.
        index: this rank's pipeline, as an index into ``pipelines``.
        device_type: the device type of the mesh, such as "cpu"; empty without a mesh.
        places: the ``Place`` of each pipeline, in the order of ``pipelines``.
        sharded: whether the mesh has a dimension for shards.
        inner: the mesh dimension "ep" or "cp", or empty without one. Ranks along this dimension
            exchange activations. Shards of a stage's parameters are divided over it, too.
    """

    pipelines: tuple[tuple[int, ...], ...]
    index: int = 0
    device_type: str = ""
    places: tuple[Place, ...] = (Place(),)
    sharded: bool = False
    inner: str = ""

    @classmethod
    def of(cls, mesh: DeviceMesh, *, shards_replicas: bool = False) -> RankLayout:
        """The layout that a mesh describes.

        Args:
            mesh: a mesh of all ranks.
            shards_replicas: whether parameters are sharded along "dp_replicate".

        Raises:
            PipelineError: ``mesh`` is not a mesh; its dimensions have no names, unknown names, or
                names that cannot be combined; or its ranks are not those of the default process
                group.
        """
        names = _names(mesh)
        _check_ranks(mesh.mesh.flatten().tolist(), names, mesh.shape)
        ranks, replicated = mesh.mesh, [name for name in names if name != PIPELINE]
        table = ranks.movedim(names.index(PIPELINE), -1) if PIPELINE in names else ranks[..., None]
        pipelines = tuple(map(tuple, table.reshape(-1, table.shape[-1]).tolist()))
        coordinates = [
            dict(zip(replicated, at, strict=True)) for at in product(*map(range, table.shape[:-1]))
        ]
        shard, inner = (
            next((name for name in several if name in names), "")
            for several in ((SHARD, EXPERT_SHARD), (EXPERT, CONTEXT))
        )
        replicate = REPLICATE
        if shards_replicas:
            replicate, shard = "", REPLICATE
        along = replicate, shard, TENSOR, inner
        places = tuple(Place(*(at.get(name, 0) for name in along)) for at in coordinates)
        rank = dist.get_rank()
        index = next(number for number, row in enumerate(pipelines) if rank in row)
        return cls(pipelines, index, mesh.device_type, places, bool(shard), inner)

    @classmethod
    def alone(cls, ranks: int) -> RankLayout:
        """The layout without a mesh: one pipeline of the ranks 0 to ``ranks`` - 1."""
        return cls((tuple(range(ranks)),))

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks of this rank's pipeline, by pipeline rank."""
        return self.pipelines[self.index]

    @property
    def place(self) -> Place:
        """The coordinates of this rank's pipeline."""
        return self.places[self.index]

    @property
    def replicas(self) -> int:
        """The number of copies of the model; each copy may be sharded."""
        return len({place.replicate for place in self.places})

    @property
    def shares(self) -> int:
        """The number of shares into which the batch is divided."""
        return len({place.share for place in self.places})

    @property
    def tensor_ranks(self) -> int:
        """The number of ranks that share the tensors of a stage."""
        return len({place.tensor for place in self.places})

    @property
    def exchanges(self) -> bool:
        """Whether graphs exchange tensors with the graphs of other ranks, as along "tp"."""
        return len({(place.tensor, place.inner) for place in self.places}) > 1

    @property
    def experts(self) -> bool:
        """Whether ranks may have different experts."""
        return self.inner == EXPERT

    @property
    def shards(self) -> int:
        """The number of ranks over which a stage's parameters, except experts, are sharded."""
        return len({place.share[1:] for place in self.places}) if self.sharded else 1

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """For each pipeline rank, the ranks of the mesh that have this rank in their pipelines."""
        return [*zip(*self.pipelines, strict=True)]

    @property
    def peers(self) -> list[tuple[int, ...]]:
        """All sets of ranks that run the same stage, each rank on its own share of the batch."""
        return self.sets("replicate", "shard", "inner")

    @property
    def copies(self) -> list[tuple[int, ...]]:
        """All sets of ranks that hold the same parameters, with the same experts and shards."""
        return self.sets("replicate")

    def shard_groups(self, *, experts: bool = False) -> list[tuple[int, ...]]:
        """All sets of ranks that together have the shards of the same parameters, or of the same
        experts.
        """
        return self.sets("shard") if experts else self.sets("shard", "inner")

    def sets(self, *along: str) -> list[tuple[int, ...]]:
        """All sets of ranks that differ only along the dimensions ``along``, in the same order on
        all ranks.

        Args:
            along: fields of ``Place``.
        """
        members: dict[tuple[int, Place], list[int]] = {}
        apart = dict.fromkeys(along, 0)
        for at, column in enumerate(self.columns):
            for rank, place in zip(column, self.places, strict=True):
                members.setdefault((at, place._replace(**apart)), []).append(rank)
        return [tuple(ranks) for ranks in members.values()]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh."""
        return tuple(sorted(rank for row in self.pipelines for rank in row))


def known_dimensions() -> str:
    """Text with the supported names of mesh dimensions and their meanings."""
    return ", ".join(f"{name!r} ({meaning})" for name, meaning in DIMENSIONS.items())


def _names(mesh: Any) -> tuple[str, ...]:
    if not isinstance(mesh, DeviceMesh):
        raise PipelineError(
            "mesh must be a DeviceMesh of torch.distributed.device_mesh; got a "
            f"{type(mesh).__name__}"
        )
    names = mesh.mesh_dim_names
    if not names:
        raise PipelineError(
            f"the dimensions of the mesh of {tuple(mesh.shape)} ranks have no names: create it by "
            "init_device_mesh(..., mesh_dim_names=(...)), with one name for each dimension, of "
            f"{known_dimensions()}"
        )
    check_dimensions(names)
    return tuple(names)


def check_dimensions(names: Sequence[str]) -> None:
    """Refuse unknown dimensions, and pairs that a mesh cannot combine.

    Raises:
        PipelineError: names the refused and the known dimensions.
    """
    for at, name in enumerate(names):
        if name in names[:at]:
            raise PipelineError(f"mesh_dim_names must be different, got {', '.join(names)}")
        if name not in DIMENSIONS:
            raise PipelineError(
                f"mesh dimension {name!r} is not supported; supported: {known_dimensions()}"
                f"{nearest(name, DIMENSIONS)}"
            )
    for one, other, advice in _APART:
        if one in names and other in names:
            raise PipelineError(
                f"mesh dimensions {one!r} and {other!r} cannot be combined, got {', '.join(names)}"
                f"{advice or ': leave one of them out'}"
            )


def _check_ranks(ranks: Sequence[int], names: Sequence[str], shape: Sequence[int]) -> None:
    world = dist.get_world_size()
    if sorted(ranks) != [*range(world)]:
        sizes = ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))
        raise PipelineError(
            f"the mesh ({sizes}) has {math.prod(shape)} ranks, {sorted(ranks)}, but the process "
            f"group has {world} ranks, 0 to {world - 1}: the mesh must have each of these once"
        )
