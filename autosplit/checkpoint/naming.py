"""Whole-model names of the tensors in a trainer's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import networkx as nx
import torch
from torch import Tensor, nn

from autosplit.errors import CheckpointError
from autosplit.pipeline.training.stage_modules import Holder

from .ranks import Ranks

if TYPE_CHECKING:
    from .reading import Checkpoint

Names: TypeAlias = "Callable[[int, str], str]"
"""The name in the whole model of what stage ``index`` calls ``name``."""


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of the whole model.

    Attributes:
        names: all its names; the optimizer's state is under the first.
        shape: its shape.
        dtype: its dtype.
    """

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.names[0]

    def source(self, there: Iterable[str]) -> str | None:
        """The name under which a checkpoint has it, among those that are there."""
        return next((name for name in self.names if name in there), None)


Groups: TypeAlias = "Sequence[Sequence[tuple[Tensor, ModelTensor]]]"
"""For each group of an optimizer, its parameters."""


@dataclass(frozen=True)
class Naming:
    """The tensors of the whole model that a checkpoint has.

    Attributes:
        entries: all of them, in the order of the stages, the same on every rank.
        own: those of this rank's stages; a tied one may be there several times.
        groups: for each group of this rank's optimizer, its parameters.
    """

    entries: Sequence[ModelTensor]
    own: Sequence[tuple[Tensor, ModelTensor]]
    groups: Groups

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
        tensors = {
            (stage, name): tensor
            for stage, module in trainer.modules.items()
            for name, tensor in module.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }
        rows = ranks.do(lambda: [_row(at, t, names, ranks.number) for at, t in tensors.items()])
        table = [row for part in ranks.gather(rows) for row in part]
        found = _joined(sorted(table, key=lambda row: row.holder[0]), trainer.shared_parameters)
        by_id = {id(tensor): found[at] for at, tensor in tensors.items()}
        own = [(tensor, found[at]) for at, tensor in tensors.items()]
        groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
        trained = [[(each, by_id[id(each)]) for each in group["params"]] for group in groups]
        return cls([*dict.fromkeys(found.values())], own, trained)

    def compare(self, checkpoint: Checkpoint, *, strict: bool) -> tuple[list[str], list[str]]:
        """Names of tensors that a checkpoint lacks, and of those that only it has. A tied tensor
        may be there under any of its names.

        Args:
            checkpoint: it.
            strict: whether there may be neither.

        Raises:
            CheckpointError: something is not what the model has: misshapen, integers where the
                model has floating point numbers, or, with ``strict``, missing or too much. It
                names them all.
        """
        there = {name: checkpoint.tensor(key) for name, key in checkpoint.model.items()}
        known = {name: entry for entry in self.entries for name in entry.names}
        missing = [entry for entry in self.entries if entry.source(there) is None]
        more = [name for name in there if name not in known]
        wrong = []
        for name, entry in known.items():
            if (came := there.get(name)) is None:
                continue
            if came.size != entry.shape:
                wrong.append(f"{name}: expected {[*entry.shape]}, came {[*came.size]}")
            elif _kind(came.properties.dtype) != _kind(entry.dtype):
                wrong.append(f"{name}: expected {entry.dtype}, came {came.properties.dtype}")
        advice = ""
        if strict and (missing or more):
            wrong += [f"{each.name}: expected {[*each.shape]}, is missing" for each in missing]
            wrong += [f"{name}: the model has no such tensor" for name in more]
            advice = "\nstrict=False leaves out what is missing or too much, not other shapes"
        if wrong:
            listed = "\n  ".join(wrong)
            raise CheckpointError(
                f"the checkpoint {checkpoint.path} does not fit the model:\n  {listed}{advice}"
            )
        return [each.name for each in missing], more


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """What values of this dtype are; they may be converted within a kind."""
    return dtype.is_complex, dtype.is_floating_point


class _Row(NamedTuple):
    """One tensor of one stage, as other ranks get to know it; ``same`` are its identities."""

    holder: Holder
    name: str
    shape: torch.Size
    dtype: torch.dtype
    same: Sequence[Any]


def _row(holder: Holder, tensor: Tensor, names: Names | None, rank: int) -> _Row:
    name = holder[1] if names is None else names(*holder)
    # The same object is one tensor, and so are buffers of one name.
    same: list[Any] = [(rank, id(tensor))]
    same += [] if isinstance(tensor, nn.Parameter) else [name]
    return _Row(holder, name, tensor.shape, tensor.dtype, same)


def _joined(table: Iterable[_Row], shared: Iterable[Iterable[Holder]]) -> dict[Holder, ModelTensor]:
    """What each of these is in the whole model: those of one tensor are one."""
    rows = {row.holder: row for row in table}
    graph: nx.Graph[Any] = nx.Graph((at, same) for at, row in rows.items() for same in row.same)
    for holders in shared:
        nx.add_path(graph, [at for at in map(tuple, holders) if at in rows])
    parts = {at: part for part in map(tuple, nx.connected_components(graph)) for at in part}
    groups: dict[Any, list[_Row]] = {}
    for at, row in rows.items():
        groups.setdefault(parts[at], []).append(row)
    found: dict[Holder, ModelTensor] = {}
    stages: dict[str, int] = {}
    for group in groups.values():
        called = tuple(dict.fromkeys(row.name for row in group))
        stage = group[0].holder[0]
        if twice := [name for name in called if name in stages]:
            raise CheckpointError(
                f"{twice[0]!r} is one parameter in stage {stages[twice[0]]} and another in stage "
                f"{stage}: for stages that were not cut from one model, give their "
                "names in it, names=lambda stage, name: ..., and tied ones as shared_parameters"
            )
        stages |= dict.fromkeys(called, stage)
        entry = ModelTensor(called, group[0].shape, group[0].dtype)
        found |= {row.holder: entry for row in group}
    return found
