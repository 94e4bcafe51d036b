"""What the tensors of a trainer's stages are called in the whole model, and where each lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import networkx as nx
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import CheckpointError
from autosplit.pipeline.training.shared import Holder
from autosplit.pipeline.training.trainer import PipelineTrainer

Names: TypeAlias = "Callable[[int, str], str]"
"""The name in the whole model of what stage ``index`` calls ``name``."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the whole model.

    Attributes:
        names: all its names; checkpoints have it under the first.
        shape: its shape.
        home: the first stage that has it.
    """

    names: tuple[str, ...]
    shape: torch.Size
    home: int = 0

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Mismatch:
    """A tensor of which the model expects something else than a checkpoint has.

    Attributes:
        name: what it is called.
        expected: its shape in the model; None: the model has no such tensor.
        came: its shape in the checkpoint; None: it is not there.
    """

    name: str
    expected: tuple[int, ...] | None
    came: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.came is None:
            return f"{self.name}: expected {list(self.expected or ())}, is missing"
        if self.expected is None:
            return f"{self.name}: the model has no such tensor, came {list(self.came)}"
        return f"{self.name}: expected {list(self.expected)}, came {list(self.came)}"


class Naming:
    """The tensors of the whole model that a checkpoint has, the same on every rank.

    Attributes:
        entries: all of them, in the order of the stages.
        own: those of this rank, by stage and name within it.
    """

    def __init__(self, entries: Iterable[Entry], own: Mapping[Holder, Entry]) -> None:
        self.entries = tuple(entries)
        self.own = dict(own)

    @classmethod
    def of_model(cls, model: nn.Module) -> Naming:
        """Of a model that is not cut; it counts as stage 0."""
        tensors = persistent(model)
        groups: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            groups.setdefault(id(tensor), []).append(name)
        entries = [Entry(tuple(group), tensors[group[0]].shape) for group in groups.values()]
        return cls(entries, {(0, name): entry for entry in entries for name in entry.names})

    @classmethod
    def of_trainer(cls, trainer: PipelineTrainer, names: Names | None) -> Naming:
        """Of a trainer's stages; collective over its ranks.

        Args:
            trainer: the trainer.
            names: None if the names within the stages are those of the whole model.

        Raises:
            CheckpointError: two stages use one name for different parameters.
        """
        table = [row for part in gather(trainer, _rows(trainer, names)) for row in part]
        rows = {row.holder: row for row in sorted(table, key=lambda row: row.order)}
        graph: nx.Graph[Holder] = nx.Graph()
        graph.add_nodes_from(rows)
        for same in (*_same(rows.values()), *trainer.shared_parameters):
            known = [tuple(holder) for holder in same if tuple(holder) in rows]
            nx.add_path(graph, known)
        found: dict[Holder, Entry] = {}
        for holder in rows:
            if holder not in found:
                group = nx.node_connected_component(graph, holder)
                ordered = dict.fromkeys(row.name for at, row in rows.items() if at in group)
                entry = Entry(tuple(ordered), rows[holder].shape, holder[0])
                found |= dict.fromkeys(group, entry)
        entries = list(dict.fromkeys(found.values()))
        _check_unique(entries)
        return cls(entries, {at: e for at, e in found.items() if at[0] in trainer.modules})

    def mismatches(self, shapes: Mapping[str, torch.Size]) -> list[Mismatch]:
        """What is missing, misshapen or too much in a checkpoint with these shapes.

        A tied tensor may be there under any of its names.
        """
        found = []
        for entry in self.entries:
            there = [name for name in entry.names if name in shapes]
            if not there:
                found.append(Mismatch(entry.name, tuple(entry.shape), None))
            wrong = [name for name in there if shapes[name] != entry.shape]
            found += [Mismatch(n, tuple(entry.shape), tuple(shapes[n])) for n in wrong]
        known = {name for entry in self.entries for name in entry.names}
        extra = [name for name in shapes if name not in known]
        return found + [Mismatch(name, None, tuple(shapes[name])) for name in extra]


def check(mismatches: Sequence[Mismatch], path: object, *, strict: bool) -> None:
    """Refuse a checkpoint that does not fit.

    Args:
        mismatches: what is wrong.
        path: of the checkpoint.
        strict: whether tensors may be missing or too much.

    Raises:
        CheckpointError: it names them all.
    """
    wrong = [m for m in mismatches if strict or None not in (m.expected, m.came)]
    if wrong:
        advice = (
            ""
            if not strict
            else ("\nstrict=False leaves out what is missing or too much, not other shapes")
        )
        listed = "\n  ".join(str(mismatch) for mismatch in wrong)
        raise CheckpointError(f"the checkpoint {path} does not fit the model:\n  {listed}{advice}")


def source(entry: Entry, shapes: Mapping[str, torch.Size]) -> str | None:
    """The name under which a checkpoint has a tensor."""
    return next((name for name in entry.names if name in shapes), None)


def persistent(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, themselves, under all their names."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def gather(trainer: PipelineTrainer, value: Any) -> list[Any]:
    """``value`` of every rank of the trainer."""
    if is_alone(trainer):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_alone(trainer: PipelineTrainer) -> bool:
    """Whether all stages are in this process."""
    return len(trainer.schedule.ranks) == 1


@dataclass(frozen=True)
class _Row:
    """One tensor of one stage, as other ranks get to know it."""

    holder: Holder
    order: tuple[int, int]
    name: str
    shape: torch.Size
    identity: tuple[int, int]
    buffer: bool


def _rows(trainer: PipelineTrainer, names: Names | None) -> list[_Row]:
    rows = []
    for stage, module in trainer.modules.items():
        for position, (name, tensor) in enumerate(persistent(module).items()):
            rows.append(
                _Row(
                    holder=(stage, name),
                    order=(stage, position),
                    name=name if names is None else names(stage, name),
                    shape=tensor.shape,
                    identity=(trainer.rank, id(tensor)),
                    buffer=not isinstance(tensor, nn.Parameter),
                )
            )
    return rows


def _same(rows: Iterable[_Row]) -> list[list[Holder]]:
    """Holders of one tensor: the same object, or buffers of the same name."""
    groups: dict[Any, list[Holder]] = {}
    for row in rows:
        groups.setdefault(row.identity, []).append(row.holder)
        if row.buffer:
            groups.setdefault(row.name, []).append(row.holder)
    return list(groups.values())


def _check_unique(entries: Iterable[Entry]) -> None:
    homes: dict[str, Entry] = {}
    for entry in entries:
        for name in entry.names:
            other = homes.setdefault(name, entry)
            if other is not entry:
                raise CheckpointError(
                    f"{name!r} is one parameter in stage {other.home} and another in stage "
                    f"{entry.home}: for stages that were not cut from one model, give their "
                    "names in it, names=lambda stage, name: ..., and tied ones as shared_parameters"
                )
