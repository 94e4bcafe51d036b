"""Read and create DTensors, such as the parameters that ``parallelize_module`` creates.

``refuse_unsupported_shardings`` refuses, before anything runs, shardings that cannot be trained.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from autosplit.errors import ShardedError


def dtensor_class() -> Any:
    """The class DTensor; None if nothing has imported it, because then no DTensor exists."""
    library = sys.modules.get("torch.distributed.tensor")
    return None if library is None else library.DTensor


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Whether a value is a DTensor; imports nothing distributed."""
    kind = type(value)
    if kind is Tensor:
        return False
    wanted = dtensor_class()
    return wanted is not None and issubclass(kind, wanted)


def local_tensor(tensor: Any) -> Tensor:
    """The local tensor of a DTensor, the same object in each call. A plain tensor is returned
    unchanged.
    """
    if not is_dtensor(tensor):
        plain: Tensor = tensor
        return plain
    local: Any = tensor._local_tensor
    wait = getattr(local, "trigger_wait", None)  # a pending redistribution
    complete: Tensor = local if wait is None else wait()
    return complete


def real_numbers(tensor: Any) -> Tensor:
    """The numbers of a tensor as real numbers without history: of a DTensor, this rank's part; of a
    sparse tensor, its values.
    """
    if type(tensor) is Tensor and not (
        tensor.is_sparse or tensor.is_complex() or tensor.requires_grad or tensor.is_neg()
    ):  # as nearly all are, and this is a step's path
        return tensor
    values = local_tensor(tensor).detach()
    if values.is_sparse:  # of an embedding
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.resolve_neg()


@dataclass(frozen=True)
class Sharding:
    """The sharding of a DTensor over ranks.

    Attributes:
        mesh: the device mesh.
        placements: one for each dimension of the mesh.
        shape: shape of the whole tensor.
        stride: strides of the whole tensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Sharding:
        """The sharding of a DTensor, traced or real."""
        mesh = tensor.device_mesh
        mesh = getattr(mesh, "real_obj", mesh)  # a traced DTensor has a proxy of its mesh
        return cls(mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def whole(self, local: Tensor) -> Tensor:
        """Return a DTensor of this sharding, without autograd history. ``local`` becomes its local
        tensor on this rank.
        """
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            whole: Tensor = DTensor.from_local(
                local, self.mesh, self.placements, shape=self.shape, stride=self.stride
            )
        return whole

    def local(self, tensor: Any) -> Tensor:
        """Return this rank's local tensor of a DTensor, in this sharding.

        If the DTensor has other placements than the sharding, it is redistributed, which is
        collective.
        """
        if tuple(tensor.placements) != self.placements:
            with torch.no_grad():
                tensor = tensor.redistribute(self.mesh, self.placements)
        return local_tensor(tensor)

    def by_dimension(self) -> list[tuple[str, Any]]:
        """(name, placement) of each mesh dimension; a dimension without a name has its index as
        name.
        """
        names = getattr(self.mesh, "mesh_dim_names", None) or range(len(self.placements))
        return list(zip(map(str, names), self.placements, strict=True))

    def is_sharded_along(self, name: str) -> bool:
        """Whether the tensor is sharded along the mesh dimension of this name."""
        return any(
            dimension == name and placement.is_shard()
            for dimension, placement in self.by_dimension()
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh, by their numbers in the default process group."""
        return tuple(sorted(self.mesh.mesh.flatten().tolist()))

    def __str__(self) -> str:
        return ", ".join(f"{name}: {placement}" for name, placement in self.by_dimension())


def shard_of(tensor: Any) -> dict[str, Any]:
    """The place of this rank's shard in a DTensor that is sharded along one mesh dimension:
    ``"dim"`` of the tensor, ``"number"`` of the shard, ``"count"`` of shards, and ``"copy"``, the
    coordinates along other mesh dimensions.
    """
    copy = [*tensor.device_mesh.get_coordinate()]
    (at,) = [at for at, placement in enumerate(tensor.placements) if placement.is_shard()]
    number, count = copy.pop(at), tensor.device_mesh.size(at)
    return {"dim": tensor.placements[at].dim, "number": number, "count": count, "copy": copy}


def sharding_of(tensor: Tensor) -> Sharding | None:
    """The sharding of a tensor; None if it is not a DTensor."""
    return Sharding.of(tensor) if is_dtensor(tensor) else None


def with_sharding_of(tensor: Tensor, local: Tensor) -> Tensor:
    """A DTensor with the sharding of ``tensor`` and the local tensor ``local``.

    Returns ``local`` itself if ``tensor`` is not a DTensor.
    """
    return Sharding.of(tensor).whole(local) if is_dtensor(tensor) else local


def redistribute_gradient(parameter: Tensor) -> None:
    """Redistribute the gradient of a DTensor to the parameter's placements.

    Collective. Partial sums are reduced.
    """
    if is_dtensor(parameter.grad):
        parameter.grad = redistribute(parameter.grad, Sharding.of(parameter).placements)


def redistribute(tensor: Any, placements: Sequence[Any]) -> Any:
    """Redistribute a DTensor over its mesh. Collective if the DTensor has other placements than the
    new ones.

    Args:
        tensor: a DTensor; None returns None.
        placements: the new placements.
    """
    if tensor is None or tuple(tensor.placements) == tuple(placements):
        return tensor
    with torch.no_grad():
        return tensor.redistribute(placements=placements)


def replicate_like(value: Any, tensor: Tensor) -> Any:
    """A value as a replicated DTensor on the mesh of ``tensor``, without communication.

    Returns the value itself if ``tensor`` is not a DTensor or if the value is a single number.

    Args:
        value: a value that is the same on each rank.
        tensor: a tensor, maybe a DTensor.
    """
    if not (is_dtensor(tensor) and isinstance(value, Tensor) and value.dim()):
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor

    sharding = Sharding.of(tensor)
    copies = [Replicate()] * len(sharding.placements)
    source = value.detach().to(tensor.device)
    return distribute_tensor(source, sharding.mesh, copies, src_data_rank=None)


_WHOLE = {
    "pp": "the stages of the pipeline, each of which has its own parameters",
    "dp_replicate": "replicas, each of which has all parameters",
}
"""Mesh dimensions over which no parameter may be sharded, by their usual names."""


def refuse_unsupported_shardings(module: nn.Module) -> None:
    """Check the shardings of a module's parameters and buffers.

    Raises:
        ShardedError: a tensor is a partial sum, is sharded unevenly, is sharded along "pp" or
            "dp_replicate", or is on a mesh without this rank.
    """
    state = chain(module.named_parameters(), module.named_buffers())
    for name, tensor in [(name, tensor) for name, tensor in state if is_dtensor(tensor)]:
        sharding = Sharding.of(tensor)
        if any(placement.is_partial() for placement in sharding.placements):
            raise ShardedError(
                f"{name} is a DTensor with partial sums ({sharding}); a parameter must be sharded "
                "or replicated. Call redistribute() on it, to Replicate() for example, before it "
                "becomes a parameter"
            )
        if tensor.device_mesh.get_coordinate() is None:
            raise ShardedError(
                f"{name} is a DTensor on {sharding.mesh}, which does not contain this rank; shard "
                "a stage over a mesh of the stage's own ranks, such as mesh['tp']"
            )
        _refuse_uneven(name, sharding)
        for dimension, placement in sharding.by_dimension():
            if dimension in _WHOLE and placement.is_shard():
                raise ShardedError(
                    f"{name} is sharded over {dimension!r} ({sharding}), {_WHOLE[dimension]}; pass "
                    "the dimension of tensor parallelism, mesh['tp'], to parallelize_module"
                )


def _refuse_uneven(name: str, sharding: Sharding) -> None:
    """Refuse uneven shards. Every rank calls it, so all ranks fail now. Later, only ranks with
    smaller shards would fail.
    """
    parts: Counter[int] = Counter()
    for at, placement in enumerate(sharding.placements):
        if placement.is_shard():
            parts[placement.dim] = max(parts[placement.dim], 1) * sharding.mesh.size(at)
    for dim, count in parts.items():
        if sharding.shape[dim] % count:
            raise ShardedError(
                f"{name} has {sharding.shape[dim]} elements in dimension {dim}, which cannot be "
                f"sharded evenly over {count} ranks ({sharding}); make it a multiple of {count}, "
                "or leave this layer out of the plan of parallelize_module"
            )
