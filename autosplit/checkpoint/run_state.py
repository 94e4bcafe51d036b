"""What a run has besides model and optimizer: its step, scheduler and random generators.

Of a learning-rate scheduler each rank has one over its own parameters. For another cut of the model
its state is taken up where that is the same on all ranks, for parameters in the same groups.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from autosplit.device import generator_state, set_generator_state
from autosplit.errors import CheckpointError

from .naming import Groups
from .plain import load_plain, packed
from .ranks import Ranks

Generators = Literal["continued", "seeded", "untouched"]
_ALL, _RANK = "all", "rank_"


def pack_run(
    ranks: Ranks, groups: Groups, *, scheduler: Any, step: int | None, extra: Mapping[str, Any]
) -> dict[str, bytes]:
    """What this rank writes.

    Raises:
        CheckpointError: something of it is neither tensors nor plain values.
    """
    own: dict[str, Any] = {"generators": _generators(ranks.trainer.device)}
    if scheduler is not None:
        own |= {"scheduler": scheduler.state_dict(), "groups": _names(groups)}
    found = {f"{_RANK}{ranks.number}": packed(own, "the scheduler's state")}
    if ranks.number == 0:
        run = {"step": step, "extra": dict(extra), "layout": _layout(ranks)}
        found[_ALL] = packed(run, "extra")
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
    same = len(rows) == ranks.count and _value(found, _ALL)["layout"] == _layout(ranks)
    own = rows[ranks.number] if same else {}
    restore: list[Callable[[], object]] = []
    if scheduler is not None:
        state = _scheduler(rows, groups, own)
        restore.append(lambda: scheduler.load_state_dict(state))
    if not generators or not rows:
        return RunState(step, extra, "untouched", restore)
    device = ranks.trainer.device
    if device.type in own.get("generators", ()):
        restore.append(lambda: _restore_generators(own["generators"], device))
        return RunState(step, extra, "continued", restore)
    # Whatever was drawn before has no influence, and no rank draws what another does.
    seed = hashlib.sha256(f"{ranks.number}{rows[0]['generators']['cpu'].tolist()}".encode())
    restore.append(lambda: torch.manual_seed(int.from_bytes(seed.digest()[:8], "little")))
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


def _scheduler(rows: Sequence[Any], groups: Groups, own: Mapping[str, Any]) -> Any:
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
    if own.get("groups") == _names(groups):
        return own["scheduler"]
    # A state has lists with an element for each group.
    then = {place for row in saved for place in _places(row["groups"])}
    texts = {json.dumps(row["scheduler"], default=_listed) for row in saved}
    if len(texts) > 1 or not {*_places(_names(groups))} <= then:
        raise CheckpointError(
            "the scheduler's state differs between the ranks of the checkpoint, or was of other "
            "groups of parameters, and nobody knows what it would be for these: group them as "
            "then, load it into as many stages, or leave out scheduler="
        )
    return saved[0]["scheduler"]


def _names(groups: Groups) -> list[list[str]]:
    return [[entry.name for _, entry in group] for group in groups]


def _places(groups: Sequence[Sequence[str]]) -> list[tuple[str, int, int]]:
    """Each parameter with its group, and how many there are."""
    return [(name, at, len(groups)) for at, names in enumerate(groups) for name in names]


def _listed(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else repr(value)


def _layout(ranks: Ranks) -> list[Any]:
    """Which rank has which stages; with another one, other ranks draw other random numbers."""
    return [[*ranks.trainer.schedule.placement], *map(list, ranks.pipelines)]


def _value(found: Mapping[str, Any], name: str) -> Any:
    content = found.get(name)
    if not isinstance(content, bytes):
        raise CheckpointError(f"the checkpoint lacks autosplit.{name}, the state of a run")
    value = load_plain(content, f"autosplit.{name}")
    if not isinstance(value, dict):
        raise CheckpointError(f"autosplit.{name} is a {type(value).__name__}, no dictionary")
    return value
