"""An optimizer's state by the names of the parameters, so that other stages can take it up.

The form is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` with
``flatten_optimizer_state_dict``: ``state.PARAMETER.KEY`` and ``param_groups.PARAMETER.KEY``.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.checkpoint.storage.plain_values import packed, plain
from autosplit.errors import CheckpointError
from autosplit.torch_internals.dtensor import laid_out

_PER_GROUP = ("params", "param_names")


def flatten(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The state of ``optimizer`` by name.

    Args:
        optimizer: any that keeps tensors and plain values for each parameter.
        names: by ``id`` of the parameter; those without a name are left out.

    Raises:
        CheckpointError: it keeps something else.
    """
    state = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    known = dict(zip(numbers, (names.get(id(p)) for p in parameters), strict=True))
    flat = {}
    for number, values in state["state"].items():
        name = known.get(number)
        for key, value in values.items() if name is not None else ():
            flat[f"state.{name}.{key}"] = _plain(value, f"{key} of {name}")
    for group in state["param_groups"]:
        options = {k: _plain(v, k) for k, v in group.items() if k not in _PER_GROUP}
        for name in (known[number] for number in group["params"] if known[number] is not None):
            flat |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
    return flat


def wanted(names: Sequence[str], keys: Iterable[str]) -> tuple[str, list[str]] | None:
    """Under which of a parameter's names a checkpoint has an optimizer's options, and which keys.

    Args:
        names: all names of the parameter.
        keys: what the checkpoint has.
    """
    for name in names:
        starts = (f"state.{name}.", f"param_groups.{name}.")
        found = [key for key in keys if key.startswith(starts)]
        if any(key.startswith(starts[1]) for key in found):
            return name, found
    return None


def is_option(key: str) -> bool:
    """Whether this is a setting of a group, and not a parameter's state."""
    return key.startswith("param_groups.")


def check_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], flat: Mapping[str, Any]
) -> None:
    """Refuse options that the groups of ``optimizer`` cannot have.

    Arguments are those of ``restore_optimizer``.

    Raises:
        CheckpointError: parameters of one group had different options.
    """
    known = _by_parameter(flat, set(names.values()))
    for group in optimizer.param_groups:
        called = [names[id(parameter)] for parameter in group["params"]]
        _check_alike([(name, known.get(f"param_groups.{name}", {})) for name in called])


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], flat: Mapping[str, Any]
) -> None:
    """Put back what ``flatten`` gave.

    Args:
        optimizer: of the same kind, with any grouping in which parameters of one group had the
            same options.
        names: by ``id`` of the parameter, the name under which ``flat`` has it.
        flat: by ``state.PARAMETER.KEY`` and so on; may have more parameters, and is one that
            ``check_groups`` lets pass.
    """
    known = _by_parameter(flat, set(names.values()))
    state: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    for group in optimizer.param_groups:
        options: dict[str, Any] = {}
        numbers = []
        for parameter in group["params"]:
            name = names[id(parameter)]
            # Copies of a tied parameter have one name, and each needs a state of its own.
            found = copy.deepcopy(known.get(f"state.{name}", {}))
            state[number] = {key: laid_out(value, parameter) for key, value in found.items()}
            options = options or known.get(f"param_groups.{name}", {})
            numbers.append(number)
            number += 1
        groups.append({**group, **options, "params": numbers})
    kept = {number: values for number, values in state.items() if values}
    optimizer.load_state_dict({"state": kept, "param_groups": groups})


def _by_parameter(flat: Mapping[str, Any], names: Collection[str]) -> dict[str, dict[str, Any]]:
    """By ``state.PARAMETER`` and ``param_groups.PARAMETER``, what there is by KEY."""
    found: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        name = rest.rpartition(".")[0]
        while name and name not in names:
            name = name.rpartition(".")[0]
        if name:
            found.setdefault(f"{kind}.{name}", {})[rest[len(name) + 1 :]] = value
    return found


def _check_alike(options: Collection[tuple[str, dict[str, Any]]]) -> None:
    for (first, expected), (name, came) in zip(options, list(options)[1:], strict=False):
        differing = [key for key in expected if came.get(key) != expected[key]]
        if differing or came.keys() != expected.keys():
            raise CheckpointError(
                f"the optimizer has {first} and {name} in one group, but in the checkpoint they "
                f"differ in {', '.join(differing) or 'their options'}: group them as then"
            )


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
