"""Whole-model names of the tensors in a trainer's stages, and the stage that holds each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import networkx as nx
import torch
from torch import Tensor, nn

from autosplit.checkpoint.storage.single_file import kind_of
from autosplit.errors import CheckpointError
from autosplit.pipeline.training.shared_parameters import Holder
from autosplit.pipeline.training.stage_trainer import StageTrainer

from .rank_agreement import Ranks

Names: TypeAlias = "Callable[[int, str], str]"
"""The name in the whole model of what stage ``index`` calls ``name``."""


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of the whole model.

    Attributes:
        names: all its names; checkpoints have it under the first.
        shape: its shape.
        dtype: its dtype.
        home: the first stage that has it.
    """

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
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

    def __init__(self, entries: Iterable[ModelTensor], own: Mapping[Holder, ModelTensor]) -> None:
        self.entries = tuple(entries)
        self.own = dict(own)

    @classmethod
    def of_model(cls, model: nn.Module) -> Naming:
        """Of a model that is not cut; it counts as stage 0."""
        tensors = persistent(model)
        groups: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            groups.setdefault(id(tensor), []).append(name)
        firsts = ((group, tensors[group[0]]) for group in groups.values())
        entries = [ModelTensor(tuple(group), first.shape, first.dtype) for group, first in firsts]
        return cls(entries, {(0, name): entry for entry in entries for name in entry.names})

    @classmethod
    def of_ranks(cls, ranks: Ranks, names: Names | None) -> Naming:
        """Of the stages of a trainer; collective over its ranks.

        Args:
            ranks: those of the trainer.
            names: None if the names within the stages are those of the whole model.

        Raises:
            CheckpointError: two stages use one name for different parameters.
        """
        trainer = ranks.trainer
        own = ranks.do(lambda: _rows(trainer, names, ranks.number))
        table = [row for part in ranks.gather(own) for row in part]
        rows = {row.holder: row for row in sorted(table, key=lambda row: row.order)}
        graph: nx.Graph[Holder] = nx.Graph()
        graph.add_nodes_from(rows)
        for same in (*_same(rows.values()), *trainer.shared_parameters):
            known = [tuple(holder) for holder in same if tuple(holder) in rows]
            nx.add_path(graph, known)
        found: dict[Holder, ModelTensor] = {}
        for holder in rows:
            if holder not in found:
                group = nx.node_connected_component(graph, holder)
                ordered = dict.fromkeys(row.name for at, row in rows.items() if at in group)
                entry = ModelTensor(
                    tuple(ordered), rows[holder].shape, rows[holder].dtype, holder[0]
                )
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


def check_mismatches(mismatches: Sequence[Mismatch], path: object, *, strict: bool) -> None:
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


def check_kinds(
    wanted: Iterable[tuple[str, torch.dtype]], kinds: Mapping[str, str], path: object
) -> None:
    """Refuse integers where the model has floating point numbers, and so on.

    Args:
        wanted: names in the checkpoint, and the dtypes that the model has.
        kinds: what the checkpoint has, see ``files.kind_of``.
        path: of the checkpoint.

    Raises:
        CheckpointError: it names them all.
    """
    wrong = [(n, dtype, kinds[n]) for n, dtype in wanted if kind_of(dtype) != kinds[n]]
    if wrong:
        listed = "\n  ".join(f"{n}: expected {dtype}, came {kind}" for n, dtype, kind in wrong)
        raise CheckpointError(f"the checkpoint {path} does not fit the model:\n  {listed}")


def source(entry: ModelTensor, shapes: Mapping[str, torch.Size]) -> str | None:
    """The name under which a checkpoint has a tensor."""
    return next((name for name in entry.names if name in shapes), None)


def persistent(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, themselves, under all their names."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class _HeldTensor:
    """One tensor of one stage, as other ranks get to know it."""

    holder: Holder
    order: tuple[int, int]
    name: str
    shape: torch.Size
    dtype: torch.dtype
    identity: tuple[int, int]
    buffer: bool


def _rows(trainer: StageTrainer, names: Names | None, rank: int) -> list[_HeldTensor]:
    rows = []
    for stage, module in trainer.modules.items():
        for position, (name, tensor) in enumerate(persistent(module).items()):
            rows.append(
                _HeldTensor(
                    holder=(stage, name),
                    order=(stage, position),
                    name=name if names is None else names(stage, name),
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    identity=(rank, id(tensor)),
                    buffer=not isinstance(tensor, nn.Parameter),
                )
            )
    return rows


def _same(rows: Iterable[_HeldTensor]) -> list[list[Holder]]:
    """Holders of one tensor: the same object, or buffers of the same name."""
    groups: dict[Any, list[Holder]] = {}
    for row in rows:
        groups.setdefault(row.identity, []).append(row.holder)
        if row.buffer:
            groups.setdefault(row.name, []).append(row.holder)
    return list(groups.values())


def _check_unique(entries: Iterable[ModelTensor]) -> None:
    homes: dict[str, ModelTensor] = {}
    for entry in entries:
        for name in entry.names:
            other = homes.setdefault(name, entry)
            if other is not entry:
                raise CheckpointError(
                    f"{name!r} is one parameter in stage {other.home} and another in stage "
                    f"{entry.home}: for stages that were not cut from one model, give their "
                    "names in it, names=lambda stage, name: ..., and tied ones as shared_parameters"
                )
