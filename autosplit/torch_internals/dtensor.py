"""DTensors, the tensors that ``parallelize_module`` makes of parameters: what a rank has of them,
gradients put together again, and those that cannot be trained refused before anything runs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from autosplit.errors import ShardedError


def dtensor_class() -> Any:
    """That of DTensors; None where nothing has imported it, so that there are none."""
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
    """What this rank has of a DTensor: the very tensor, whichever is asked for how often; any other
    tensor is its own.
    """
    if not is_dtensor(tensor):
        plain: Tensor = tensor
        return plain
    local: Any = tensor._local_tensor
    wait = getattr(local, "trigger_wait", None)  # of a redistribution that is under way
    complete: Tensor = local if wait is None else wait()
    return complete


@dataclass(frozen=True)
class Sharding:
    """How a DTensor lies over ranks.

    Attributes:
        mesh: the ranks.
        placements: one for each dimension of the mesh.
        shape: of the whole tensor.
        stride: likewise.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Sharding:
        """That of a DTensor; one that was traced has a stand-in for its mesh."""
        mesh = tensor.device_mesh
        mesh = getattr(mesh, "real_obj", mesh)
        return cls(mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def whole(self, local: Tensor) -> Tensor:
        """The DTensor of which this rank has ``local``, without autograd's history."""
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            whole: Tensor = DTensor.from_local(
                local, self.mesh, self.placements, shape=self.shape, stride=self.stride
            )
        return whole

    def local(self, tensor: Any) -> Tensor:
        """What this rank has of a DTensor of this shape when it lies so; redistributed, which all
        ranks take part in, where it lies otherwise.
        """
        if tuple(tensor.placements) != self.placements:
            with torch.no_grad():
                tensor = tensor.redistribute(self.mesh, self.placements)
        return local_tensor(tensor)

    def by_dimension(self) -> list[tuple[str, Any]]:
        """Name of each dimension of the mesh, its number where it has none, and the placement."""
        names = getattr(self.mesh, "mesh_dim_names", None) or range(len(self.placements))
        return list(zip(map(str, names), self.placements, strict=True))

    def is_sharded_along(self, name: str) -> bool:
        """Whether ranks along a dimension of this name have parts of their own."""
        return any(
            dimension == name and placement.is_shard()
            for dimension, placement in self.by_dimension()
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh, as the default process group numbers them."""
        return tuple(sorted(self.mesh.mesh.flatten().tolist()))

    def __str__(self) -> str:
        return ", ".join(f"{name}: {placement}" for name, placement in self.by_dimension())


def sharding_of(tensor: Tensor) -> Sharding | None:
    """How a tensor lies over ranks; None where it is no DTensor."""
    return Sharding.of(tensor) if is_dtensor(tensor) else None


def with_sharding_of(tensor: Tensor, local: Tensor) -> Tensor:
    """``local`` as this rank's part of what lies over ranks as ``tensor`` does; itself where that
    is no DTensor.
    """
    return Sharding.of(tensor).whole(local) if is_dtensor(tensor) else local


def redistribute_gradient(parameter: Tensor) -> None:
    """Have the gradient of a DTensor lie over ranks as it does: a sum that ranks have parts of is
    reduced. Its ranks take part.
    """
    if is_dtensor(parameter.grad):
        parameter.grad = redistribute(parameter.grad, Sharding.of(parameter).placements)


def redistribute(tensor: Any, placements: Sequence[Any]) -> Any:
    """A DTensor with these placements on its mesh; itself where it lies so, or is None. Its ranks
    take part.
    """
    if tensor is None or tuple(tensor.placements) == tuple(placements):
        return tensor
    with torch.no_grad():
        return tensor.redistribute(placements=placements)


def replicate_like(value: Any, tensor: Tensor) -> Any:
    """A value that each rank has the whole of, as copies on the ranks of ``tensor``; itself where
    that is no DTensor, or where it is a single number. Nothing is sent.
    """
    if not (is_dtensor(tensor) and isinstance(value, Tensor) and value.dim()):
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor

    sharding = Sharding.of(tensor)
    copies = [Replicate()] * len(sharding.placements)
    source = value.detach().to(tensor.device)
    return distribute_tensor(source, sharding.mesh, copies, src_data_rank=None)


_WHOLE = {
    "pp": "the stages of the pipeline, of which each has parameters of its own",
    "dp_replicate": "replicas, each of which has all parameters",
}
"""Dimensions of meshes over which no parameter is sharded, by the ecosystem's names for them."""


def refuse_unsupported_shardings(module: nn.Module) -> None:
    """Check how a module's parameters and buffers lie over ranks.

    Raises:
        ShardedError: one is a sum that has not been reduced, is sharded unevenly, over the stages
            of a pipeline, or over ranks without this one.
    """
    for name, tensor in _dtensors(module):
        sharding = Sharding.of(tensor)
        if any(placement.is_partial() for placement in sharding.placements):
            raise ShardedError(
                f"{name} is a DTensor that ranks have parts of a sum of ({sharding}); a parameter "
                "is sharded or replicated. Call redistribute() on it, to Replicate() for example, "
                "before it becomes a parameter"
            )
        if tensor.device_mesh.get_coordinate() is None:
            raise ShardedError(
                f"{name} lies on {sharding.mesh}, in which this rank is not; build a stage on the "
                "ranks of its own mesh, such as mesh['tp'] of a mesh that has all ranks"
            )
        _refuse_uneven(name, sharding)
        for dimension, placement in sharding.by_dimension():
            if dimension in _WHOLE and placement.is_shard():
                raise ShardedError(
                    f"{name} is sharded over {dimension!r} ({sharding}), {_WHOLE[dimension]}; give "
                    "parallelize_module the dimension of tensor parallelism, mesh['tp']"
                )


def _refuse_uneven(name: str, sharding: Sharding) -> None:
    """All ranks see it, though only some have less: those alone would fail, and others wait."""
    parts: Counter[int] = Counter()
    for at, placement in enumerate(sharding.placements):
        if placement.is_shard():
            parts[placement.dim] = max(parts[placement.dim], 1) * sharding.mesh.size(at)
    for dim, count in parts.items():
        if sharding.shape[dim] % count:
            raise ShardedError(
                f"{name} has {sharding.shape[dim]} elements in dimension {dim}, which {count} "
                f"ranks cannot share evenly ({sharding}); make it a multiple of {count}, or leave "
                "this layer out of the plan of parallelize_module"
            )


def _dtensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for space in (module.named_parameters(), module.named_buffers()):
        for name, tensor in space:
            if is_dtensor(tensor):
                yield name, tensor
