"""An optimizer's state by the names of the parameters, so that other stages can take it up.

The form is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` with
``flatten_optimizer_state_dict``: ``state.PARAMETER.KEY`` and ``param_groups.PARAMETER.KEY``. Those
of torch themselves step an optimizer that has no state yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autosplit.errors import CheckpointError
from autosplit.pipeline.training.copies import PER_GROUP
from autosplit.torch_internals.dtensor import copied_along

from .naming import Groups
from .plain import packed, plain
from .reading import Checkpoint

_STATE, _OPTIONS = "state", "param_groups"


def flatten(optimizer: torch.optim.Optimizer, groups: Groups) -> dict[str, Any]:
    """The state of ``optimizer``, of which ``groups`` are the parameters, by name.

    Raises:
        CheckpointError: it keeps something else than tensors and plain values.
    """
    state = optimizer.state_dict()
    flat: dict[str, Any] = {}
    for group, numbered in zip(groups, state["param_groups"], strict=True):
        options = {k: _plain(v, k) for k, v in numbered.items() if k not in PER_GROUP}
        for (_, entry), number in zip(group, numbered["params"], strict=True):
            for key, value in state["state"].get(number, {}).items():
                if "." in key:
                    raise CheckpointError(f"the optimizer's {key} of {entry.name} has a '.' in it")
                flat[f"{_STATE}.{entry.name}.{key}"] = _plain(value, f"{key} of {entry.name}")
            flat |= {f"{_OPTIONS}.{entry.name}.{key}": value for key, value in options.items()}
    return flat


def _plain(value: Any, what: str) -> Any:
    if value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str):
        return value
    try:
        packed(value, what)
    except CheckpointError as error:
        raise CheckpointError(
            f"the optimizer's {what} is a {type(value).__name__}; only tensors and plain values "
            "can go from one cut of a model to another: save trainer.optimizer.state_dict() of "
            "each rank instead"
        ) from error
    return plain(value)


class FoundGroup(NamedTuple):
    """What a checkpoint has for a group of an optimizer: its options, and where it has the state of
    each parameter.
    """

    options: Mapping[str, Any]
    states: Sequence[Mapping[str, str]]


def find(checkpoint: Checkpoint, groups: Groups) -> list[FoundGroup]:
    """What a checkpoint has for an optimizer with these groups, verified.

    Raises:
        CheckpointError: nothing for some parameter, or parameters of one group had different
            options, or it is damaged.
    """
    states, options = (_by_parameter(checkpoint, kind) for kind in (_STATE, _OPTIONS))
    entries = [entry for group in groups for _, entry in group]
    if lacking := sorted({each.name for each in entries if each.source(options) is None}):
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} has no optimizer state for "
            f"{', '.join(lacking)}: optimizer=False leaves the optimizer as it is"
        )
    found = []
    for group in groups:
        names = [entry.source(options) or "" for _, entry in group]
        read = {n: {k: checkpoint.read(at) for k, at in options[n].items()} for n in names}
        _check_alike(read)
        places = [states.get(name, {}) for name in names]
        for at in chain.from_iterable(each.values() for each in places):
            checkpoint.verify(at)
        found.append(FoundGroup(next(iter(read.values()), {}), places))
    return found


def _by_parameter(checkpoint: Checkpoint, kind: str) -> dict[str, dict[str, str]]:
    """Of parameters by name: by KEY the entry of a checkpoint."""
    found: dict[str, dict[str, str]] = {}
    for path, at in checkpoint.under(f"optimizer.{kind}.").items():
        name, _, key = path.rpartition(".")
        found.setdefault(name, {})[key] = at
    return found


def _check_alike(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse options of parameters, by name, that one group cannot have."""
    for (first, expected), (name, came) in pairwise(options.items()):
        if differing := [k for k in {**expected, **came} if expected.get(k) != came.get(k)]:
            raise CheckpointError(
                f"the optimizer has {first} and {name} in one group, but in the checkpoint "
                f"they differ in {', '.join(differing)}: group them as then"
            )


def restore(
    checkpoint: Checkpoint,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    found: Sequence[FoundGroup],
) -> None:
    """Take up what was found."""
    numbers = count()
    state: dict[int, dict[str, Any]] = {}
    options = []
    for group, (saved, places), own in zip(groups, found, optimizer.param_groups, strict=True):
        options.append({**own, **saved, "params": [next(numbers) for _ in group]})
        for number, (parameter, _), keys in zip(options[-1]["params"], group, places, strict=True):
            if keys:
                state[number] = {k: _value(checkpoint, at, parameter) for k, at in keys.items()}
    optimizer.load_state_dict({"state": state, "param_groups": options})


def _value(checkpoint: Checkpoint, key: str, parameter: Tensor) -> Any:
    kind = checkpoint.tensor(key)
    if kind is None or kind.size != parameter.shape:
        return copied_along(checkpoint.read(key), parameter)
    value = torch.empty_like(parameter, dtype=kind.properties.dtype)  # sharded as it is
    checkpoint.fill(key, value)
    return value
