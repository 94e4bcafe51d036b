"""Whole-model names of the tensors in a trainer's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from autosplit.errors import CheckpointError, with_code
from autosplit.trainer.stage_modules import Holder

from .ranks import Ranks

if TYPE_CHECKING:
    from .reading import Checkpoint

Names: TypeAlias = "Callable[[int, str], str]"
"""Maps a stage's index and a name in it to the name in the whole model."""


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of the whole model.

    Attributes:
        names: all names of the tensor; the optimizer's state is saved under the first.
        shape: the tensor's shape.
        dtype: the tensor's dtype.
    """

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.names[0]

    def checkpoint_name(self, available: Iterable[str]) -> str | None:
        """The first of the tensor's names that is in ``available``; None if no name is."""
        return next((name for name in self.names if name in available), None)


Groups: TypeAlias = "Sequence[Sequence[tuple[Tensor, ModelTensor]]]"
"""The parameters of each group of an optimizer."""


@dataclass(frozen=True)
class Naming:
    """The tensors of the whole model, by name.

    Attributes:
        entries: all tensors, in the order of the stages, the same on every rank.
        local: the tensors of this rank's stages; a tied tensor may occur several times.
        groups: for each group of this rank's optimizer, its (parameter, ModelTensor) pairs.
    """

    entries: Sequence[ModelTensor]
    local: Sequence[tuple[Tensor, ModelTensor]]
    groups: Groups

    @classmethod
    def of_ranks(cls, ranks: Ranks, names: Names | None) -> Naming:
        """Name the tensors of a trainer's stages; collective over its ranks.

        Args:
            ranks: the trainer's ranks.
            names: see ``save_checkpoint``; None if the stages already use the names of the whole
                model.

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
        entries = _joined(sorted(table, key=lambda row: row.holder[0]), trainer.shared_parameters)
        by_id = {id(tensor): entries[at] for at, tensor in tensors.items()}
        local = [(tensor, entries[at]) for at, tensor in tensors.items()]
        groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
        trained = [
            [(parameter, by_id[id(parameter)]) for parameter in group["params"]] for group in groups
        ]
        return cls([*dict.fromkeys(entries.values())], local, trained)

    def compare(self, checkpoint: Checkpoint, *, strict: bool) -> tuple[list[str], list[str]]:
        """Return (names of tensors that the checkpoint lacks, names that only the checkpoint has).

        A checkpoint may have a tied tensor under any of its names.

        Args:
            checkpoint: the checkpoint.
            strict: whether to refuse missing and unexpected tensors.

        Raises:
            CheckpointError: a tensor has another shape, or integers instead of floating-point
                numbers; or, with ``strict``, tensors are missing or unexpected. The error lists
                all of these tensors.
        """
        saved = {name: checkpoint.tensor(key) for name, key in checkpoint.model.items()}
        expected = {name: entry for entry in self.entries for name in entry.names}
        missing = [entry for entry in self.entries if entry.checkpoint_name(saved) is None]
        unexpected = [name for name in saved if name not in expected]
        problems = []
        for name, entry in expected.items():
            if (tensor := saved.get(name)) is None:
                continue
            if tensor.size != entry.shape:
                problems.append(f"{name}: expected {[*entry.shape]}, got {[*tensor.size]}")
            elif _kind(tensor.properties.dtype) != _kind(entry.dtype):
                problems.append(f"{name}: expected {entry.dtype}, got {tensor.properties.dtype}")
        advice = ""
        if strict and (missing or unexpected):
            problems += [
                f"{entry.name}: expected {[*entry.shape]}, is missing" for entry in missing
            ]
            problems += [f"{name}: the model has no such tensor" for name in unexpected]
            advice = "\nstrict=False ignores missing and unexpected tensors, not other shapes"
        if problems:
            listed = "\n  ".join(problems)
            raise CheckpointError(
                f"the checkpoint {checkpoint.path} does not fit the model:\n  {listed}{advice}"
            )
        return [entry.name for entry in missing], unexpected


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """The kind of a dtype's values: (is complex, is floating-point). Values are only converted
    within a kind.
    """
    return dtype.is_complex, dtype.is_floating_point


class _Row(NamedTuple):
    """One tensor of one stage, as a row that ranks exchange.

    If the ``same`` of two rows have an element in common, both rows are about one tensor.
    """

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
    """Return the whole model's tensor for each holder.

    Args:
        table: the rows of all ranks.
        shared: groups of holders; all holders of a group have the same tensor.
    """
    rows = {row.holder: row for row in table}
    links = [(at, same) for at, row in rows.items() for same in row.same]
    for holders in shared:
        links += pairwise(at for at in map(tuple, holders) if at in rows)
    linked = _linked(links)
    groups: dict[int, list[_Row]] = {}
    for at, row in rows.items():
        groups.setdefault(id(linked[at]), []).append(row)
    entries: dict[Holder, ModelTensor] = {}
    stages: dict[str, int] = {}
    for group in groups.values():
        names = tuple(dict.fromkeys(row.name for row in group))
        stage = group[0].holder[0]
        if repeated := next((name for name in names if name in stages), None):
            raise CheckpointError(
                with_code(
                    f"{repeated!r} is one parameter in stage {stages[repeated]} and another in "
                    f"stage {stage}: stages that were not cut from one model need names= with the "
                    "names in the whole model, and tied ones shared_parameters=. Pass the same "
                    "names= when you load. A run's checkpoints take them as "
                    "CheckpointManager(folder, names=...)",
                    wrong="save_checkpoint(trainer, path)",
                    right="save_checkpoint(trainer, path, "
                    'names=lambda stage, name: f"{stage}.{name}")',
                )
            )
        stages |= dict.fromkeys(names, stage)
        entry = ModelTensor(names, group[0].shape, group[0].dtype)
        entries |= {row.holder: entry for row in group}
    return entries


def _linked(links: Iterable[tuple[Any, Any]]) -> dict[Any, set[Any]]:
    """Map each element to the set of all elements that links connect with it."""
    sets: dict[Any, set[Any]] = {}
    for first, second in links:
        both = sets.get(first, {first}) | sets.get(second, {second})
        sets |= dict.fromkeys(both, both)
    return sets
