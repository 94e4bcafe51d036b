"""Whole-model names of the tensors in a trainer's stages, and the stage that holds each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import networkx as nx
import torch
from torch import Tensor, nn

from autosplit.errors import CheckpointError
from autosplit.pipeline.training.shared_parameters import Holder

from .files import Checkpoint, kind_of
from .ranks import Ranks

if TYPE_CHECKING:
    from autosplit.pipeline.trainer import PipelineTrainer

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

    def source(self, there: Mapping[str, Any]) -> str | None:
        """The name under which a checkpoint has it, among those that are there."""
        return next((name for name in self.names if name in there), None)


@dataclass(frozen=True)
class Mismatch:
    """A tensor that a model and a checkpoint do not both have.

    Attributes:
        name: what it is called.
        expected: its shape in the model; None: the model has no such tensor.
        came: its shape in the checkpoint; None: it is not there.
    """

    name: str
    expected: tuple[int, ...] | None
    came: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.expected is None:
            return f"{self.name}: the model has no such tensor, came {list(self.came or ())}"
        return f"{self.name}: expected {list(self.expected)}, is missing"


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
    def of_ranks(cls, ranks: Ranks, names: Names | None) -> Naming:
        """Of the stages of a trainer; collective over its ranks.

        Args:
            ranks: those of the trainer.
            names: None if the names within the stages are those of the whole model.

        Raises:
            CheckpointError: two stages use one name for different parameters.
        """
        trainer = ranks.trainer
        own = ranks.do(lambda: _rows(trainer.modules, names, ranks.number))
        table = [row for part in ranks.gather(own) for row in part]
        found = _joined(sorted(table, key=lambda row: row.holder[0]), trainer.shared_parameters)
        entries = dict.fromkeys(found.values())
        _check_unique(entries)
        return cls(entries, {at: e for at, e in found.items() if at[0] in trainer.modules})

    def fitting(self, checkpoint: Checkpoint, *, strict: bool) -> tuple[Mismatch, ...]:
        """What is missing or too much in a checkpoint. A tied tensor may be there under any of its
        names.

        Args:
            checkpoint: it.
            strict: whether tensors may be neither.

        Raises:
            CheckpointError: something is not what the model has: misshapen, integers where the
                model has floating point numbers, or, with ``strict``, missing or too much. It
                names them all.
        """
        there = checkpoint.model
        found: list[Mismatch] = []
        wrong: list[object] = []
        for entry in self.entries:
            if entry.source(there) is None:
                found.append(Mismatch(entry.name, tuple(entry.shape), None))
            for name in entry.names:
                if name in there and there[name].shape != entry.shape:
                    came = list(there[name].shape or ())
                    wrong.append(f"{name}: expected {list(entry.shape)}, came {came}")
                elif name in there and there[name].kind != kind_of(entry.dtype):
                    wrong.append(f"{name}: expected {entry.dtype}, came {there[name].kind}")
        known = {name for entry in self.entries for name in entry.names}
        more = (name for name in there if name not in known)
        found += [Mismatch(name, None, tuple(there[name].shape or ())) for name in more]
        advice = ""
        if found and strict:
            wrong += found
            advice = "\nstrict=False leaves out what is missing or too much, not other shapes"
        if wrong:
            listed = "\n  ".join(map(str, wrong))
            raise CheckpointError(
                f"the checkpoint {checkpoint.path} does not fit the model:\n  {listed}{advice}"
            )
        return tuple(found)


def persistent(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, themselves, under all their names."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def tensors_of(trainer: PipelineTrainer, holders: Iterable[Holder]) -> dict[Holder, Tensor]:
    """The tensors of this rank's ``holders``."""
    found = {stage: persistent(module) for stage, module in trainer.modules.items()}
    return {(stage, name): found[stage][name] for stage, name in holders}


def trained(trainer: PipelineTrainer, naming: Naming) -> list[dict[int, ModelTensor]]:
    """For each group of this rank's optimizer, what its parameters are in the whole model, by
    ``id``.
    """
    tensors = tensors_of(trainer, naming.own)
    entries = {id(tensors[at]): entry for at, entry in naming.own.items()}
    groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
    return [{id(p): entries[id(p)] for p in group["params"]} for group in groups]


@dataclass(frozen=True)
class _HeldTensor:
    """One tensor of one stage, as other ranks get to know it."""

    holder: Holder
    name: str
    shape: torch.Size
    dtype: torch.dtype
    identity: tuple[int, int]
    buffer: bool


def _rows(modules: Mapping[int, nn.Module], names: Names | None, rank: int) -> list[_HeldTensor]:
    return [
        _HeldTensor(
            (stage, name),
            name if names is None else names(stage, name),
            tensor.shape,
            tensor.dtype,
            (rank, id(tensor)),
            not isinstance(tensor, nn.Parameter),
        )
        for stage, module in modules.items()
        for name, tensor in persistent(module).items()
    ]


def _joined(
    table: Iterable[_HeldTensor], shared: Iterable[Iterable[Holder]]
) -> dict[Holder, ModelTensor]:
    """What each of these is in the whole model: those of one tensor are one."""
    rows = {row.holder: row for row in table}
    graph: nx.Graph[Holder] = nx.Graph()
    graph.add_nodes_from(rows)
    for same in (*_same(rows.values()), *shared):
        nx.add_path(graph, [tuple(holder) for holder in same if tuple(holder) in rows])
    places = {holder: place for place, holder in enumerate(rows)}
    found: dict[Holder, ModelTensor] = {}
    for holder, first in rows.items():
        if holder not in found:
            group = sorted(nx.node_connected_component(graph, holder), key=places.__getitem__)
            called = dict.fromkeys(rows[at].name for at in group)
            entry = ModelTensor(tuple(called), first.shape, first.dtype, holder[0])
            found |= dict.fromkeys(group, entry)
    return found


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
