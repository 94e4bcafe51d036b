"""The state of a run except the model: optimizer, step, scheduler and random generators.

An optimizer's state is saved by parameter name, so that other stages can load it. The format is the
result of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` with
``flatten_optimizer_state_dict``: ``state.PARAMETER.KEY`` and ``param_groups.PARAMETER.KEY``.
Torch's functions are not used, because they step an optimizer that has no state yet.

Each rank has a learning-rate scheduler over its own parameters. If the model is cut differently, a
scheduler's state is only loaded if it was equal on all ranks, for parameters in the same groups.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count, pairwise
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from autosplit.device import generator_state, set_generator_state
from autosplit.errors import CheckpointError
from autosplit.text.figures import few
from autosplit.torch_internals.dtensor import replicate_like
from autosplit.trainer.replicated_parameters import PER_GROUP

from .naming import Groups
from .plain import load_plain, packed, plain
from .ranks import Ranks
from .reading import Checkpoint

_STATE, _OPTIONS = "state", "param_groups"


def flatten_optimizer(optimizer: torch.optim.Optimizer, groups: Groups) -> dict[str, Any]:
    """The state of an optimizer as one flat dictionary, by parameter name.

    Args:
        optimizer: the optimizer.
        groups: the (parameter, ModelTensor) pairs of each group of the optimizer.

    Raises:
        CheckpointError: the state has values that are neither tensors nor plain.
    """
    state = optimizer.state_dict()
    flat: dict[str, Any] = {}
    for group, numbered in zip(groups, state["param_groups"], strict=True):
        options = {k: _plain(v, k) for k, v in numbered.items() if k not in PER_GROUP}
        for (_, entry), number in zip(group, numbered["params"], strict=True):
            for key, value in state["state"].get(number, {}).items():
                if "." in key:
                    raise CheckpointError(
                        f"the optimizer's state {key!r} of {entry.name} has a '.' in its name, "
                        "which a checkpoint uses as separator: rename it in the optimizer"
                    )
                flat[f"{_STATE}.{entry.name}.{key}"] = _plain(value, f"{key} of {entry.name}")
            flat |= {f"{_OPTIONS}.{entry.name}.{key}": value for key, value in options.items()}
    return flat


def _plain(value: Any, subject: str) -> Any:
    if value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str):
        return value
    try:
        packed(value, subject)
    except CheckpointError as error:
        raise CheckpointError(
            f"the optimizer's {subject} is a {type(value).__name__}; a checkpoint can have tensors "
            "and plain values only: save trainer.optimizer.state_dict() of each rank instead"
        ) from error
    return plain(value)


class FoundGroup(NamedTuple):
    """A checkpoint's options for one parameter group of an optimizer, and for each parameter of the
    group the entries with the parameter's state.
    """

    options: Mapping[str, Any]
    states: Sequence[Mapping[str, str]]


def find_optimizer(
    checkpoint: Checkpoint,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    saved_groups: Sequence[Sequence[str]],
) -> list[FoundGroup]:
    """Find and verify a checkpoint's state for an optimizer.

    Args:
        checkpoint: the checkpoint.
        optimizer: the optimizer that will load it.
        groups: the (parameter, ModelTensor) pairs of each group of the optimizer.
        saved_groups: the parameter groups of all ranks when the checkpoint was saved; empty if
            unknown.

    Raises:
        CheckpointError: a parameter has no state, the state is of another kind of optimizer, the
            optimizer groups its parameters in another way than the saved one, or the state is
            damaged.
    """
    states, options = (_by_parameter(checkpoint, kind) for kind in (_STATE, _OPTIONS))
    entries = [entry for group in groups for _, entry in group]
    if lacking := sorted(
        {entry.name for entry in entries if entry.checkpoint_name(options) is None}
    ):
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} has no optimizer state for {few(lacking, 3)}. "
            f"Expected entries such as optimizer.{_OPTIONS}.{lacking[0]}.lr, which save_checkpoint "
            "writes, and torch with flatten_optimizer_state_dict=True. Pass optimizer=False to "
            "leave the optimizer as it is"
        )
    matches = []
    place = {name: at for at, names in enumerate(saved_groups) for name in names}
    first: dict[int | str, Mapping[str, Any]] = {}
    for group, present in zip(groups, optimizer.param_groups, strict=True):
        names = [entry.checkpoint_name(options) or "" for _, entry in group]
        read = {n: {k: checkpoint.read(at) for k, at in options[n].items()} for n in names}
        _check_alike(read)
        saved = next(iter(read.values()), {})
        _check_kind(saved, present, optimizer)
        options_now = {key: present.get(key) for key in saved}
        for name in names:
            if first.setdefault(place.get(name, name), options_now) != options_now:
                raise CheckpointError(
                    f"in the checkpoint, {name} shares an optimizer group, and its options, with "
                    "other parameters than now. Restore that grouping, set the options of the "
                    "groups after the load, or use optimizer=False, which leaves the optimizer as "
                    "it is"
                )
        places = [states.get(name, {}) for name in names]
        for at in chain.from_iterable(keys.values() for keys in places):
            checkpoint.verify(at)
        matches.append(FoundGroup(saved, places))
    return matches


def _by_parameter(checkpoint: Checkpoint, kind: str) -> dict[str, dict[str, str]]:
    """Map the name of each parameter to its entries ``optimizer.{kind}.PARAMETER.KEY``: by KEY, the
    entry's whole key in the checkpoint.
    """
    entries: dict[str, dict[str, str]] = {}
    for path, at in checkpoint.under(f"optimizer.{kind}.").items():
        name, _, key = path.rpartition(".")
        entries.setdefault(name, {})[key] = at
    return entries


def _check_alike(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse parameters of one group that were saved with different options."""
    for (first, expected), (name, came) in pairwise(options.items()):
        if differing := [k for k in {**expected, **came} if expected.get(k) != came.get(k)]:
            raise CheckpointError(
                f"the optimizer has {first} and {name} in one group, but in the checkpoint "
                f"they differ in {', '.join(differing)}: restore the grouping of the checkpoint"
            )


def _check_kind(saved: Mapping[str, Any], present: Mapping[str, Any], optimizer: Any) -> None:
    """Refuse the options of another kind of optimizer. Added options are accepted: another version
    of torch, and schedulers (``initial_lr``, ``max_momentum``), only add options.
    """
    more = [k for k in saved if k not in present and not k.endswith(("_lr", "_momentum"))]
    lacking = [k for k in getattr(optimizer, "defaults", ()) if k not in saved]
    if more and lacking:
        raise CheckpointError(
            f"the checkpoint is of another kind of optimizer: {', '.join(more)} are not options of "
            f"{type(optimizer).__name__}, and its {', '.join(lacking)} are missing. Use the same "
            "kind of optimizer, or optimizer=False, which leaves this one as it is"
        )


def restore_optimizer(
    checkpoint: Checkpoint,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    matches: Sequence[FoundGroup],
) -> None:
    """Load the state that ``find_optimizer`` returned."""
    numbers = count()
    state: dict[int, dict[str, Any]] = {}
    options = []
    for group, (saved, places), present in zip(
        groups, matches, optimizer.param_groups, strict=True
    ):
        options.append({**present, **saved, "params": [next(numbers) for _ in group]})
        for number, (parameter, _), keys in zip(options[-1]["params"], group, places, strict=True):
            if keys:
                state[number] = {
                    k: _load_value(checkpoint, at, parameter) for k, at in keys.items()
                }
    optimizer.load_state_dict({"state": state, "param_groups": options})


def _load_value(checkpoint: Checkpoint, key: str, parameter: Tensor) -> Any:
    kind = checkpoint.tensor(key)
    if kind is None or kind.size != parameter.shape:
        return replicate_like(checkpoint.read(key), parameter)
    value = torch.empty_like(parameter, dtype=kind.properties.dtype)  # sharded as it is
    checkpoint.fill(key, value)
    return value


# --- step, scheduler and random generators --------------------------------------------------------


Generators = Literal["continued", "seeded", "untouched"]
_ALL, _RANK = "all", "rank_"


def pack_run(
    ranks: Ranks, groups: Groups, *, scheduler: Any, step: Any, extra: Any
) -> dict[str, bytes]:
    """Pack this rank's entries of a checkpoint: scheduler, generators and names of parameters; on
    rank 0 also the entries about the whole run.

    Raises:
        CheckpointError: a value is neither a tensor nor plain.
    """
    if not (isinstance(step, Integral | None) and isinstance(extra, Mapping | None)):
        raise CheckpointError(
            "step= must be an integer or None, and extra= a dictionary or None; got "
            f"step={step!r} and a {type(extra).__name__} as extra"
        )
    local = {"generators": _generators(ranks.trainer.device), "groups": _names(groups)}
    if scheduler is not None:
        local["scheduler"] = scheduler.state_dict()
    entries = {f"{_RANK}{ranks.number}": packed(local, "the scheduler's state")}
    if ranks.number == 0:
        scaler = ranks.trainer.grad_scaler
        run = {
            "step": step,
            "extra": dict(extra or {}),
            "layout": ranks.layout,
            "cut": ranks.cut,
            "planning": ranks.trainer.planning,
            "grad_scaler": scaler and scaler.state_dict(),
        }
        entries[_ALL] = packed(run, "extra")
    return entries


class RunState(NamedTuple):
    """The state of a run for this rank.

    Attributes:
        step: as passed to ``save_checkpoint``.
        extra: as passed to ``save_checkpoint``.
        generators: how random generators are restored, see ``Loaded``.
        groups: the parameter groups of the optimizers of all ranks.
        restore: functions that set the scheduler, the scale of losses and the generators.
    """

    step: int | None
    extra: dict[str, Any]
    generators: Generators
    groups: Sequence[Sequence[str]]
    restore: Sequence[Callable[[], object]]


def unpack_run(
    entries: Mapping[str, Any], ranks: Ranks, groups: Groups, *, scheduler: Any, generators: bool
) -> RunState:
    """Read this rank's part of the run's state, without setting anything yet.

    Args:
        entries: the results of ``pack_run`` of all ranks; empty for a checkpoint
            that ``save_checkpoint`` did not write.
        ranks: the ranks that continue the run.
        groups: the (parameter, ModelTensor) pairs of each group of this rank's optimizer.
        scheduler: the learning-rate scheduler to restore, or None.
        generators: whether to set random generators.

    Raises:
        CheckpointError: the state is damaged, or does not fit this run.
    """
    progress = whole_run(entries)
    rows = [_value(entries, f"{_RANK}{rank}") for rank in range(len(entries) - 1)]
    run = _value(entries, _ALL) if rows else {}
    is_same_layout = len(rows) == ranks.count and run["layout"] == ranks.layout
    local = rows[ranks.number] if is_same_layout else {}
    generators_of = local or (rows[0] if run.get("cut") == ranks.cut and _alike(rows) else {})
    saved_groups = [names for row in rows for names in row.get("groups", ())]
    restore: list[Callable[[], object]] = []
    if scheduler is not None:
        state = _scheduler(rows, groups, local)
        restore.append(lambda: scheduler.load_state_dict(state))
    if (scaler := ranks.trainer.grad_scaler) and run.get("grad_scaler"):
        restore.append(lambda: scaler.load_state_dict(run["grad_scaler"]))
    device = ranks.trainer.device
    outcome: Generators = "untouched"
    if generators and device.type in generators_of.get("generators", ()):
        outcome = "continued"
        restore.append(lambda: _restore_generators(generators_of["generators"], device))
    elif generators and rows:
        # Whatever was drawn before has no influence, and no rank draws what another does.
        outcome = "seeded"
        seed = hashlib.sha256(f"{ranks.number}{rows[0]['generators']['cpu'].tolist()}".encode())
        restore.append(lambda: torch.manual_seed(int.from_bytes(seed.digest()[:8], "little")))
    return RunState(progress.get("step"), progress.get("extra", {}), outcome, saved_groups, restore)


def whole_run(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entry about the whole run: step, ``extra``, and how the trainer cut its model. Empty for
    a checkpoint that ``save_checkpoint`` did not write.

    Args:
        entries: the results of ``pack_run`` of all ranks.

    Raises:
        CheckpointError: the entry is damaged.
    """
    run: dict[str, Any] = _value(entries, _ALL) if _ALL in entries else {}
    return run


def _generators(device: torch.device) -> dict[str, Tensor]:
    """Maps the type of a device to the state of its random generator, for the CPU and
    ``device``.
    """
    return {kind.type: generator_state(kind) for kind in (torch.device("cpu"), device)}


def _alike(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ranks saved the same state of the CPU's generator, as ranks with equal seeds do.
    If so, any number of ranks can continue from that state.
    """
    return all(torch.equal(row["generators"]["cpu"], rows[0]["generators"]["cpu"]) for row in rows)


def _restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    for kind in (torch.device("cpu"), device):
        set_generator_state(kind, states[kind.type])


def _scheduler(rows: Sequence[Any], groups: Groups, local: Mapping[str, Any]) -> Any:
    """The state for this rank's scheduler: the state that this rank saved, or a state that was
    equal on all ranks.

    Args:
        rows: the saved entries of all ranks; some may have no scheduler.
        groups: the optimizer's present parameter groups.
        local: the entry that this rank saved, if its stages have not changed since; else empty.

    Raises:
        CheckpointError: there is no state, or it cannot be mapped to these groups.
    """
    saved = [row for row in rows if "scheduler" in row]
    if not saved:
        raise CheckpointError("the checkpoint has no state of a scheduler: leave out scheduler=")
    if "scheduler" in local and local["groups"] == _names(groups):
        return local["scheduler"]
    # A state has lists with an element for each group.
    saved_places = {place for row in saved for place in _places(row["groups"])}
    texts = {json.dumps(row["scheduler"], default=_listed) for row in saved}
    if len(texts) > 1 or not {*_places(_names(groups))} <= saved_places:
        raise CheckpointError(
            "the scheduler's state differs between the ranks of the checkpoint, or has other "
            "groups of parameters, and cannot be mapped to the present groups. Restore the "
            "grouping, use as many stages as the checkpoint, or leave out scheduler="
        )
    return saved[0]["scheduler"]


def _names(groups: Groups) -> list[list[str]]:
    return [[entry.name for _, entry in group] for group in groups]


def _places(groups: Sequence[Sequence[str]]) -> list[tuple[str, int, int]]:
    """(name of a parameter, number of its group in the optimizer, number of groups) for each
    parameter.
    """
    return [(name, at, len(groups)) for at, names in enumerate(groups) for name in names]


def _listed(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else repr(value)


def _value(entries: Mapping[str, Any], name: str) -> Any:
    content = entries.get(name)
    if not isinstance(content, bytes):
        raise CheckpointError(
            f"the checkpoint lacks the entry autosplit.{name}, the state of a run: it was not "
            "written by save_checkpoint, or is damaged"
        )
    value = load_plain(content, f"autosplit.{name}")
    if not isinstance(value, dict):
        raise CheckpointError(
            f"the checkpoint's entry autosplit.{name} must be a dictionary, got a "
            f"{type(value).__name__}: it was not written by save_checkpoint, or is damaged"
        )
    return value
