"""The state of a learning-rate scheduler, of which each rank has one over its own parameters.

Most of it is the same on all ranks; some lists have an element for each group of parameters, and
ranks may have other groups. For another cut of the model these are put together by parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autosplit.errors import CheckpointError
from autosplit.pipeline.training.optimizer_step import same_value

# Of the schedulers in torch.optim.lr_scheduler.
_PER_GROUP = {
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "max_lrs",
    "min_lrs",
    "base_momentums",
    "max_momentums",
}
_INNER = "_schedulers"


@dataclass(frozen=True)
class SchedulerState:
    """A rank's scheduler in a checkpoint.

    Attributes:
        state: its ``state_dict()``.
        groups: the names of the parameters of each group of its optimizer.
    """

    state: dict[str, Any]
    groups: list[list[str]]


def regrouped(
    saved: Sequence[SchedulerState], groups: Sequence[Sequence[Sequence[str]]]
) -> dict[str, Any]:
    """The state for a scheduler over other groups.

    Args:
        saved: of all ranks that had a scheduler.
        groups: for each group of the optimizer now, for each of its parameters, all its names.

    Raises:
        CheckpointError: parameters of one group had different values, or what is not by group
            differs between ranks.
    """
    where = {
        name: (rank, index)
        for rank, each in enumerate(saved)
        for index, group in enumerate(each.groups)
        for name in group
    }
    places = []
    for group in groups:
        known = [next((n for n in names if n in where), None) for names in group]
        if absent := [names[0] for names, n in zip(group, known, strict=True) if n is None]:
            raise CheckpointError(f"no scheduler of the checkpoint had {', '.join(absent)}")
        places.append([(name, where[name]) for name in known if name is not None])
    return _merged([each.state for each in saved], places)


_Place = tuple[str, tuple[int, int]]


def _merged(states: Sequence[Mapping[str, Any]], places: list[list[_Place]]) -> dict[str, Any]:
    if any(state.keys() != states[0].keys() for state in states):
        raise CheckpointError("the ranks of the checkpoint had different schedulers")
    found: dict[str, Any] = {}
    for key, value in states[0].items():
        if key in _PER_GROUP and isinstance(value, list):
            found[key] = [_of_group(key, states, group) for group in places]
        elif key == _INNER and isinstance(value, list):
            inner = zip(*(state[key] for state in states), strict=True)
            found[key] = [_merged(each, places) for each in inner]
        elif all(same_value(state[key], value) for state in states):
            found[key] = value
        else:
            raise CheckpointError(
                f"the scheduler's {key} differs between the ranks of the checkpoint, and nobody "
                "knows what it would be for another number of stages: load it into as many, or "
                "leave out scheduler="
            )
    return found


def _of_group(key: str, states: Sequence[Mapping[str, Any]], group: list[_Place]) -> Any:
    values = [(name, states[rank][key][index]) for name, (rank, index) in group]
    first, value = values[0]
    for name, other in values:
        if not same_value(value, other):
            raise CheckpointError(
                f"the scheduler has {first} and {name} in one group, but in the checkpoint they "
                f"differ in {key}: group them as then"
            )
    return value
