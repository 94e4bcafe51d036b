"""What a run has besides model and optimizer: its step, scheduler and random generators.

Of a learning-rate scheduler each rank has one over its own parameters. For another cut of the model
its state is taken up where that is the same on all ranks, for parameters in the same groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from autosplit.device import generator_state, set_generator_state
from autosplit.errors import CheckpointError
from autosplit.torch_internals.pytree import tree_flatten

from .files import load_plain, packed
from .naming import ModelTensor
from .ranks import Ranks

Generators = Literal["continued", "seeded", "untouched"]
Groups = Sequence[Mapping[int, ModelTensor]]
"""For each group of a rank's optimizer, its parameters."""
_ALL, _RANK = "all", "rank_"


def pack_run(
    ranks: Ranks, groups: Groups, *, scheduler: Any, step: int | None, extra: Mapping[str, Any]
) -> dict[str, Tensor]:
    """What this rank writes, each as bytes.

    Raises:
        CheckpointError: something of it is neither tensors nor plain values.
    """
    own: dict[str, Any] = {"generators": _generators(ranks.trainer.device)}
    if scheduler is not None:
        own |= {"scheduler": scheduler.state_dict(), "groups": _names(groups)}
    found = {f"{_RANK}{ranks.number}": _bytes(own, "the scheduler's state")}
    if ranks.number == 0:
        run = {"step": step, "extra": dict(extra), "layout": _layout(ranks)}
        found[_ALL] = _bytes(run, "extra")
    return found


class RunState(NamedTuple):
    """What a checkpoint has of a run, for this rank.

    Attributes:
        step: as it was given.
        extra: likewise.
        generators: what becomes of them.
        restore: calls that set the scheduler and the generators.
    """

    step: int | None
    extra: dict[str, Any]
    generators: Generators
    restore: Sequence[Callable[[], object]]


def unpack_run(
    found: Mapping[str, Any], ranks: Ranks, groups: Groups, *, scheduler: Any, generators: bool
) -> RunState:
    """What there is for this rank; nothing is set yet.

    Args:
        found: what ``pack_run`` gave on all ranks; empty for a checkpoint of others.
        ranks: those that take it up.
        groups: of this rank's optimizer.
        scheduler: that is to take up a state; None: there is none.
        generators: whether to set random generators.

    Raises:
        CheckpointError: it is damaged, or does not fit.
    """
    step, extra = progress(found)
    rows = [_value(found, f"{_RANK}{rank}") for rank in range(len(found) - 1)]
    same = bool(rows) and _value(found, _ALL)["layout"] == _layout(ranks)
    same = same and len(rows) == ranks.count
    restore: list[Callable[[], object]] = []
    if scheduler is not None:
        state = _scheduler(rows, groups, rows[ranks.number] if same else {})
        restore.append(lambda: scheduler.load_state_dict(state))
    if not generators or not rows:
        return RunState(step, extra, "untouched", restore)
    device, number = ranks.trainer.device, ranks.number
    states = [row["generators"] for row in rows]
    if same and device.type in states[number]:
        restore.append(lambda: _restore_generators(states[number], device))
        return RunState(step, extra, "continued", restore)
    restore.append(lambda: _reseed(states, number))
    return RunState(step, extra, "seeded", restore)


def progress(found: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """The step and ``extra`` of a run, as ``save_checkpoint`` was given them.

    Args:
        found: what ``pack_run`` gave on all ranks; empty for a checkpoint of others.

    Raises:
        CheckpointError: it is damaged.
    """
    if _ALL not in found:
        return None, {}
    run = _value(found, _ALL)
    return run["step"], run["extra"]


def _generators(device: torch.device) -> dict[str, Tensor]:
    """Where the CPU's generator stands, and that of ``device`` if it is an accelerator."""
    found = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        found[device.type] = generator_state(device)
    return found


def _restore_generators(found: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(found["cpu"])
    if device.type != "cpu":
        set_generator_state(device, found[device.type])


def _reseed(found: Sequence[Mapping[str, Tensor]], rank: int) -> None:
    """Seed all generators by where those of other ranks stood, and by the rank.

    Whatever was drawn before has no influence, and no rank draws what another does.
    """
    summary = hashlib.sha256(str(rank).encode())
    for each in found:
        summary.update(bytes(each["cpu"].tolist()))
    torch.manual_seed(int.from_bytes(summary.digest()[:8], "little"))


def _scheduler(rows: Sequence[Any], groups: Groups, own: Mapping[str, Any]) -> dict[str, Any]:
    """The state for a scheduler: this rank's own, or that which all ranks had.

    Args:
        rows: of all ranks; some had none.
        groups: of the optimizer now.
        own: this rank's row, where its stages are those of then.

    Raises:
        CheckpointError: there was none, or for these groups nobody knows what it would be.
    """
    saved = [row for row in rows if "scheduler" in row]
    if not saved:
        raise CheckpointError("the checkpoint has no scheduler's state: leave out scheduler=")
    state: dict[str, Any] = (own if "scheduler" in own else saved[0])["scheduler"]
    if own.get("groups") == _names(groups):
        return state
    # A state has lists with an element for each group.
    count = len(saved[0]["groups"])
    where = {n: index for row in saved for index, ns in enumerate(row["groups"]) for n in ns}
    then = [{where.get(entry.source(where) or "") for entry in g.values()} for g in groups]
    moved = len(then) != count or any(found - {index} for index, found in enumerate(then))
    if moved or not all(_same(row["scheduler"], state) for row in saved):
        raise CheckpointError(
            "the scheduler's state differs between the ranks of the checkpoint, or was of other "
            "groups of parameters, and nobody knows what it would be for these: group them as "
            "then, load it into as many stages, or leave out scheduler="
        )
    return state


def _names(groups: Groups) -> list[list[str]]:
    return [[entry.name for entry in group.values()] for group in groups]


def _layout(ranks: Ranks) -> list[Any]:
    """Which rank has which stages; with another one, other ranks draw other random numbers."""
    schedule = ranks.trainer.schedule
    replicas = [[*pipeline] for pipeline in ranks.pipelines] if len(ranks.pipelines) > 1 else []
    return [len(schedule.ranks), [*schedule.placement], *replicas]


def _value(found: Mapping[str, Any], name: str) -> Any:
    content = found.get(name)
    if not isinstance(content, Tensor):
        raise CheckpointError(f"the checkpoint lacks autosplit.{name}, the state of a run")
    value = load_plain(bytes(content.tolist()), f"autosplit.{name}")
    if not isinstance(value, dict):
        raise CheckpointError(f"autosplit.{name} is a {type(value).__name__}, no dictionary")
    return value


def _bytes(value: Any, what: str) -> Tensor:
    return torch.frombuffer(bytearray(packed(value, what)), dtype=torch.uint8)


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal; tensors by their values."""
    (ours, form), (theirs, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(
        type(a) is type(b) and (torch.equal(a, b) if isinstance(a, Tensor) else a == b)
        for a, b in zip(ours, theirs, strict=True)
    )
