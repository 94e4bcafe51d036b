"""What a run has besides model and optimizer: its step, scheduler and random generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from autosplit.checkpoint.rank_agreement import Ranks
from autosplit.checkpoint.storage.plain_values import packed
from autosplit.checkpoint.storage.single_file import load_plain
from autosplit.errors import CheckpointError

from . import random_state, scheduler_state

Generators = Literal["continued", "seeded", "untouched"]
Groups = list[list[tuple[str, ...]]]
"""For each group of a rank's optimizer, for each of its parameters, all its names."""
_ALL, _RANK = "all", "rank_"


def pack_run(
    ranks: Ranks, groups: Groups, *, scheduler: Any, step: int | None, extra: Mapping[str, Any]
) -> dict[str, Tensor]:
    """What this rank writes, each as bytes.

    Raises:
        CheckpointError: something of it is neither tensors nor plain values.
    """
    own: dict[str, Any] = {"generators": random_state.states(ranks.trainer.device)}
    if scheduler is not None:
        own["scheduler"] = scheduler.state_dict()
        own["groups"] = [[names[0] for names in group] for group in groups]
    packed = {f"{_RANK}{ranks.number}": _bytes(own, "the scheduler's state")}
    if ranks.number == 0:
        run = {"step": step, "extra": dict(extra), "layout": _layout(ranks)}
        packed[_ALL] = _bytes(run, "extra")
    return packed


def check_alike(ranks: Ranks, *, scheduler: Any, step: int | None) -> None:
    """Refuse what ranks were told differently; collective.

    Raises:
        CheckpointError: on every rank.
    """
    moves = ranks.trainer.optimizer is not None
    said = ranks.gather((step, scheduler is not None if moves else None))
    if len({each for each, _ in said}) > 1:
        raise CheckpointError(f"the ranks are at different steps: {[each for each, _ in said]}")
    if len({given for _, given in said if given is not None}) > 1:
        lacking = [str(rank) for rank, (_, given) in enumerate(said) if given is False]
        raise CheckpointError(
            f"rank {', '.join(lacking)} gave no scheduler and others did: give one on every rank "
            "that has an optimizer"
        )


@dataclass
class RunState:
    """What a checkpoint has of a run, for this rank.

    Attributes:
        step: as it was given.
        extra: likewise.
        generators: what ``restore`` does with them.
    """

    step: int | None
    extra: dict[str, Any]
    generators: Generators
    _restore: list[Callable[[], object]]

    def restore(self) -> None:
        """Set the scheduler and the generators."""
        for each in self._restore:
            each()


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
    if _ALL not in found:
        if scheduler is not None:
            raise CheckpointError("the checkpoint has no scheduler's state: leave out scheduler=")
        return RunState(None, {}, "untouched", [])
    run = _value(found, _ALL)
    rows = [_value(found, f"{_RANK}{rank}") for rank in range(len(found) - 1)]
    same = run["layout"] == _layout(ranks) and len(rows) == ranks.count
    restore: list[Callable[[], object]] = []
    if scheduler is not None:
        state = _scheduler(rows, ranks, groups, same=same)
        restore.append(lambda: scheduler.load_state_dict(state))
    how: Generators = "untouched"
    if generators:
        device = ranks.trainer.device
        states = [row["generators"] for row in rows]
        how = "continued" if same and device.type in states[ranks.number] else "seeded"
        if how == "continued":
            own = states[ranks.number]
            random_state.check_generators(own, device)
            restore.append(lambda: random_state.restore_generators(own, device))
        else:
            restore.append(lambda: random_state.reseed(states, ranks.number))
    return RunState(run["step"], run["extra"], how, restore)


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


def _scheduler(rows: list[Any], ranks: Ranks, groups: Groups, *, same: bool) -> dict[str, Any]:
    saved = [
        scheduler_state.SchedulerState(row["scheduler"], row["groups"])
        for row in rows
        if "scheduler" in row
    ]
    if not saved:
        raise CheckpointError("the checkpoint has no scheduler's state: leave out scheduler=")
    own = rows[ranks.number] if same else {}
    if own.get("groups") == [[names[0] for names in group] for group in groups]:
        state: dict[str, Any] = own["scheduler"]
        return state
    return scheduler_state.regrouped(saved, groups)


def _layout(ranks: Ranks) -> list[Any]:
    """Which rank has which stages; with another one, other ranks draw other random numbers."""
    schedule = ranks.trainer.schedule
    mirror = None if schedule.mirror is None else [*schedule.mirror]
    replicas = [[*pipeline] for pipeline in ranks.pipelines] if len(ranks.pipelines) > 1 else []
    return [len(schedule.ranks), [*schedule.placement], mirror, *replicas]


def _value(found: Mapping[str, Any], name: str) -> Any:
    packed = found.get(name)
    if not isinstance(packed, Tensor):
        raise CheckpointError(f"the checkpoint lacks autosplit.{name}, the state of a run")
    value = load_plain(bytes(packed.tolist()), f"autosplit.{name}")
    if not isinstance(value, dict):
        raise CheckpointError(f"autosplit.{name} is a {type(value).__name__}, no dictionary")
    return value


def _bytes(value: Any, what: str) -> Tensor:
    return torch.frombuffer(bytearray(packed(value, what)), dtype=torch.uint8)
