"""Refusal of DTensors that cannot be trained as parameters, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from autosplit.errors import ShardedError

from .dtensor import Sharding, is_dtensor

_WHOLE = {
    "pp": "the stages of the pipeline, of which each has parameters of its own",
    "dp_replicate": "replicas, each of which has all parameters",
}
"""Dimensions of meshes over which no parameter is sharded, by the ecosystem's names for them."""


def refuse_lost_shardings(module: nn.Module) -> None:
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
