"""What all ranks of a trainer must be told alike: options and meshes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import Place, RankLayout
from autosplit.pipeline.engine.default_group import gather
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.stages import SplitStage, StageFactory
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.schedule.wiring import Wiring

_OF_STAGES = ("backend", "grad_dtype")
_OF_GRAPHS = ("memory", "overlap")


def check_unanimous(said: Mapping[str, Any], groups: Groups) -> None:
    """Hold what this rank was told against what the others were; collective.

    Without it, some would clip and others not, or wait for a message that nobody sends.

    Args:
        said: by name; the same names on every rank.
        groups: the trainer's process groups.

    Raises:
        PipelineError: names the first difference and the ranks.
    """
    heard = groups.everybody.gather({name: _text(value) for name, value in said.items()})
    for name in said:
        first = heard[0][name]
        for rank, other in enumerate(part[name] for part in heard):
            if other != first:
                raise PipelineError(
                    f"every rank must build the same trainer, but {name} is {first} on rank 0 and "
                    f"{other} on rank {rank}"
                )


def check_layout(layout: RankLayout) -> None:
    """Refuse meshes that differ, and one that only some ranks have, over the default process group:
    the trainer's are made by them. Does nothing for a trainer of one rank.

    Raises:
        PipelineError: names two ranks and what they were given.
    """
    if len(layout.ranks) == 1:
        return
    heard = gather((layout.device_type, layout.pipelines, tuple(map(tuple, layout.places))))
    kind, pipelines, places = heard[0]
    for rank, (other_kind, others, other_places) in enumerate(heard):
        if (others, other_places) != (pipelines, places):
            what = f"its pipelines are {pipelines} on rank 0 and {others} on rank {rank}"
            if others == pipelines:
                what = (
                    f"its pipelines are at the places {places} along {', '.join(Place._fields)} "
                    f"on rank 0 and {other_places} on rank {rank}"
                )
            if not (kind and other_kind):
                what = f"rank {rank if kind else 0} has none: {what}"
            raise PipelineError(f"every rank must be given the same mesh, but {what}")


def _text(value: object) -> str:
    if isinstance(value, Schedule):
        order = _digest(value.ranks, value.placement)
        return f"{value.name!r} (split_backward={value.split_backward}, order {order})"
    if isinstance(value, Wiring):
        return f"one of order {_digest(value)}"
    return repr(value)


def factory_options(factory: StageFactory, *, shared: bool = False) -> dict[str, Any]:
    """Those options of the stages that change results; of another factory, that it is one.

    ``memory`` and ``overlap`` change no bit, and may be a rank's own, unless ranks
    share tensors: then their graphs must have the same collectives in the same order.

    Args:
        factory: makes a stage.
        shared: whether ranks share the tensors of a stage.
    """
    names = (*_OF_STAGES, *(_OF_GRAPHS if shared else ()))
    if not isinstance(factory, SplitStage):
        return {"stage_factory": "given", **dict.fromkeys(names)}
    return {"stage_factory": None, **{name: getattr(factory, name) for name in names}}


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]
