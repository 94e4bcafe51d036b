"""An optimizer's state by the names of the parameters, so that other stages can take it up.

The form is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` with
``flatten_optimizer_state_dict``: ``state.PARAMETER.KEY`` and ``param_groups.PARAMETER.KEY``.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import CheckpointError
from autosplit.torch_internals.dtensor import laid_out

from .files import Entry, packed, plain

STATE, OPTIONS = "state", "param_groups"
_PER_GROUP = ("params", "param_names")
Found = Mapping[str, Mapping[str, Mapping[str, Entry]]]
"""Of parameters by name, ``STATE`` and ``OPTIONS``: by KEY what a checkpoint has."""


def flatten(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The state of ``optimizer`` by name.

    Args:
        optimizer: any that keeps tensors and plain values for each parameter.
        names: by ``id`` of the parameter; those without a name are left out.

    Raises:
        CheckpointError: it keeps something else.
    """
    state = optimizer.state_dict()
    flat: dict[str, Any] = {}
    for group, numbered in zip(optimizer.param_groups, state["param_groups"], strict=True):
        options = {k: _plain(v, k) for k, v in numbered.items() if k not in _PER_GROUP}
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            if (name := names.get(id(parameter))) is None:
                continue
            for key, value in state["state"].get(number, {}).items():
                flat[f"{STATE}.{name}.{key}"] = _plain(value, f"{key} of {name}")
            flat |= {f"{OPTIONS}.{name}.{key}": value for key, value in options.items()}
    return flat


def find(entries: Mapping[str, Entry], names: Collection[str]) -> Found:
    """What entries of a checkpoint there are of parameters."""
    found: dict[str, dict[str, dict[str, Entry]]] = {}
    for path, entry in entries.items():
        kind, _, rest = path.partition(".")
        name = rest.rpartition(".")[0]
        while name and name not in names:
            name = name.rpartition(".")[0]
        if name:
            found.setdefault(name, {}).setdefault(kind, {})[rest[len(name) + 1 :]] = entry
    return found


def read(there: Found, kind: str) -> dict[str, dict[str, Any]]:
    """What there is of a kind, of parameters by name."""
    return {
        name: {key: entry.read() for key, entry in kinds.get(kind, {}).items()}
        for name, kinds in there.items()
    }


def check_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    options: Mapping[str, Mapping[str, Any]],
) -> None:
    """Refuse options that the groups of ``optimizer`` cannot have.

    Args:
        optimizer: what is to have them.
        names: by ``id`` of the parameter, its name in ``options``.
        options: of parameters by name.

    Raises:
        CheckpointError: parameters of one group had different options.
    """
    for group in optimizer.param_groups:
        called = [names[id(parameter)] for parameter in group["params"]]
        for first, name in pairwise(called):
            expected, came = options[first], options[name]
            differing = [key for key in expected if came.get(key) != expected[key]]
            if differing or came.keys() != expected.keys():
                raise CheckpointError(
                    f"the optimizer has {first} and {name} in one group, but in the checkpoint "
                    f"they differ in {', '.join(differing) or 'their options'}: group them as then"
                )


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    state: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Mapping[str, Any]],
) -> None:
    """Put back what ``flatten`` gave.

    Args:
        optimizer: of the same kind, with any grouping that ``check_groups`` lets pass.
        names: by ``id`` of the parameter, its name in ``state`` and ``options``.
        state: of parameters by name.
        options: likewise.
    """
    numbers = count()
    kept: dict[int, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        own = []
        for parameter in group["params"]:
            own.append(next(numbers))
            # Copies of a tied parameter have one name, and each needs a state of its own.
            found = copy.deepcopy(state[names[id(parameter)]])
            if found:
                kept[own[-1]] = {key: laid_out(value, parameter) for key, value in found.items()}
        alike = [options[names[id(parameter)]] for parameter in group["params"][:1]]
        groups.append({**group, **(alike[0] if alike else {}), "params": own})
    optimizer.load_state_dict({"state": kept, "param_groups": groups})


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
