"""What tracing may take from DTensors besides their local tensors, as plain data: placements,
meshes, and the rules by which operators are run on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from .dtensor import dtensor_class, is_dtensor

_PLACEMENTS: dict[str, tuple[str, ...]] = {
    "Shard": ("dim",),
    "Replicate": (),
    "Partial": ("reduce_op",),
    "_StridedShard": ("dim", "split_factor"),
}


def placement_facts(placement: Any) -> tuple[Any, ...] | None:
    """A placement of torch's as plain data; None for anything else."""
    kind, types = type(placement), sys.modules.get("torch.distributed.tensor.placement_types")
    if types is None or kind is not getattr(types, kind.__name__, None):
        return None
    fields = _PLACEMENTS.get(kind.__name__)
    if fields is None:
        return None
    return (kind.__name__, *(getattr(placement, field) for field in fields))


def placement_of(facts: tuple[Any, ...]) -> Any:
    """The placement of ``placement_facts``.

    Raises:
        KeyError: there is none of this name.
    """
    from torch.distributed.tensor import placement_types

    name, *values = facts
    return getattr(placement_types, name)(**dict(zip(_PLACEMENTS[name], values, strict=True)))


def mesh_facts(mesh: Any) -> tuple[Any, ...] | None:
    """A DeviceMesh as plain data: its ranks, their groups, and this rank's place; None for anything
    else. Meshes with the same facts are the same to graphs, which know groups by their names.
    """
    library = sys.modules.get("torch.distributed.device_mesh")
    if library is None or not isinstance(mesh, library.DeviceMesh):
        return None
    place = mesh.get_coordinate()
    return (
        mesh.device_type,
        mesh.mesh.tolist(),
        mesh.mesh_dim_names,
        None if place is None else tuple(place),
        group_names(mesh),
    )


def group_names(mesh: Any) -> tuple[str, ...]:
    """The name of this rank's process group along each dimension."""
    return tuple(mesh.get_group(at).group_name for at in range(mesh.ndim))


def meshes_of(values: Iterable[Any]) -> list[Any]:
    """The meshes of the DTensors among some values, each once."""
    found: list[Any] = []
    for value in values:
        if is_dtensor(value) and value.device_mesh not in found:
            found.append(value.device_mesh)
    return found


def dispatch_rules() -> Iterator[tuple[str, Any]]:
    """Everything that decides how an operator on DTensors is traced, by name: functions that run an
    operator in another way, those that choose placements, and settings.
    """
    dispatcher = dtensor_class()._op_dispatcher
    for operator, handler in dispatcher._custom_op_handlers.items():
        yield f"run {operator}", handler
    for table in vars(dispatcher.sharding_propagator).values():
        for operator, rule in table.items() if isinstance(table, dict) else ():
            rule = getattr(rule, "func", rule)
            if callable(rule):
                yield f"shard {operator}", rule
    yield "copies", getattr(dispatcher, "_allow_implicit_replication", None)
    random = sys.modules.get("torch.distributed.tensor._random")
    yield "random", type(getattr(random, "_rng_tracker", None)).__name__
