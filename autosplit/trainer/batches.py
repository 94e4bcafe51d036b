"""Check the batches of one rank, cut them into microbatches, and run backward from their tensors.

step((inputs, targets))         one batch, which is cut along dimension 0
step(microbatches=[...])        a ``MicrobatchList``: nothing is cut
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autosplit.errors import PipelineError, with_code
from autosplit.torch_internals.pytree import flatten_named, tree_flatten, tree_unflatten
from autosplit.trainer.batch_checks import (
    check_alike,
    check_complete,
    check_cuttable,
    check_has_data,
    kind,
)

BatchPart: TypeAlias = "Tensor | Sequence[Tensor]"
"""The targets of a batch, or its inputs: one tensor or several, samples along dimension 0."""

Inputs: TypeAlias = "BatchPart | Sequence[Tensor | None] | Mapping[str, Tensor]"
"""The inputs of a batch: a dictionary where the wiring names them. A rank may leave out inputs
that its stages do not use: None in a tuple, no such key in a dictionary."""

Batch: TypeAlias = "tuple[Inputs | None, BatchPart | None]"
"""Inputs and targets. A rank may pass None for a part that its stages do not use, or for both."""

BatchSlot: TypeAlias = "tuple[str, int]"
"""A tensor of a batch: one of its ``inputs`` or of its ``targets``, by number."""

Microbatches: TypeAlias = "list[list[Any]]"
"""For each microbatch its tensors, in order; None for tensors that this rank does not use."""


@dataclass(frozen=True)
class MicrobatchList:
    """The microbatches of a step as the caller passes them, each of its own sizes.

    Attributes:
        batches: (inputs, targets) of each microbatch.
        beside_batch: whether the caller has passed a batch or targets, too, which is refused.
    """

    batches: Sequence[Any]
    beside_batch: bool = False


class _NotPassed:
    def __repr__(self) -> str:
        return "<not passed>"


NOT_PASSED: Any = _NotPassed()
"""In place of ``target``, if a call has only a batch. ``target=None`` says that this rank has no
targets, and the batch is the inputs."""


def paired(
    batch: Any,
    target: BatchPart | None,
    named: Mapping[str, Tensor],
    microbatches: Sequence[Any] | None = None,
) -> Batch | MicrobatchList | None:
    """Return a batch as the pair (inputs, targets), or the list of microbatches.

    Args:
        batch: the pair; or only the inputs, with ``target``; or None, with ``named``.
        target: the targets; None if this rank has none; ``NOT_PASSED`` if they are in the pair.
        named: the inputs by name.
        microbatches: pairs (inputs, targets), in place of ``batch``, ``target`` and ``named``.
    """
    is_pair = target is NOT_PASSED and not named
    target = None if target is NOT_PASSED else target
    if microbatches is not None:
        has_batch = batch is not None or target is not None or bool(named)
        return MicrobatchList(microbatches, has_batch)
    if named:
        # A batch beside named inputs becomes a pair that is an error on all ranks.
        batch = named if batch is None else (batch, named)
    return batch if is_pair else (batch, target)


def chunk_sizes(samples: int, count: int) -> list[int]:
    """The numbers of samples in the microbatches of a batch, as ``torch.chunk`` cuts it."""
    size = -(-samples // count)
    return [min(size, samples - start) for start in range(0, samples, size)] if size else []


class BatchSplitter:
    """Checks batches and lists of microbatches for one rank, and cuts batches into microbatches.

    Tensors that this rank does not use are checked too, so that a bad batch is an error on every
    rank that passes it.

    Args:
        microbatches: M, the number of microbatches into which a batch is cut.
        device: the device of the microbatches.
        inputs: positions of the inputs that this rank's stages use; None for all inputs.
        targets: whether this rank has the last stage, which uses the targets.
        names: the names of the inputs, if they may come as a dictionary.
        flattens: whether stages take the tensors inside of an input object, not the object. Stages
            that are cut from a model do.
    """

    def __init__(
        self,
        microbatches: int,
        device: torch.device,
        *,
        inputs: frozenset[int] | None,
        targets: bool,
        names: Sequence[str] = (),
        flattens: bool = False,
    ) -> None:
        self._count = microbatches
        self._device = device
        # By part, the numbers of the tensors that are used; None for all.
        self._used = {"inputs": inputs, "targets": None if targets else frozenset()}
        self._names, self._flattens = names, flattens

    def split(
        self, batch: Batch | MicrobatchList | None, count: int
    ) -> tuple[Microbatches, Microbatches]:
        """Return (inputs by microbatch, targets by microbatch) of a batch that ``check_batch`` has
        accepted.

        Microbatches of a batch are views along dimension 0. Inputs that this rank does not use are
        an empty list; so are its unused targets.

        Args:
            batch: the batch, or the list of microbatches.
            count: the number of microbatches.
        """
        if isinstance(batch, MicrobatchList):
            rows = zip(*batch.batches or (), strict=True)
            all_inputs, all_targets = rows
            return self._rows("inputs", all_inputs), self._rows("targets", all_targets)
        inputs, targets = (None, None) if batch is None else batch
        return self._chunks("inputs", inputs, count), self._chunks("targets", targets, count)

    def _rows(self, name: str, parts: Sequence[Any]) -> Microbatches:
        used = self._used[name]
        if parts[0] is None or (used is not None and not used):
            return []
        return [
            [
                self._moved(value, dense=True) if used is None or number in used else None
                for number, value in enumerate(self._arguments(name, part))
            ]
            for part in parts
        ]

    def _moved(self, value: Any, *, dense: bool = False) -> Any:
        """Return the value with its tensors on the device of the microbatches. With ``dense``,
        tensors have no gaps in memory, so that strides follow from sizes.
        """
        if isinstance(value, Tensor):
            moved = value.detach() if value.requires_grad else value
            if value.device != self._device:
                moved = moved.to(self._device, non_blocking=True)
            is_dense = (
                not dense or torch.empty_like(moved, device="meta").stride() == moved.stride()
            )
            return moved if is_dense else moved.contiguous()
        leaves, spec = tree_flatten(value)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return value
        return tree_unflatten(
            [self._moved(x, dense=dense) if isinstance(x, Tensor) else x for x in leaves], spec
        )

    def _chunks(self, name: str, part: Any, count: int) -> Microbatches:
        used = self._used[name]
        if part is None or (used is not None and not used):
            return []
        chunks: list[Sequence[Tensor | None]] = []
        for number, tensor in enumerate(self._arguments(name, part)):
            if used is not None and number not in used:
                chunks.append([None] * count)
                continue
            moved = self._moved(tensor)
            chunks.append(moved.chunk(count) if moved.dim() else [moved] * count)
        return [*map(list, zip(*chunks, strict=True))] or [[] for _ in range(count)]

    def first_inputs(self, batch: Batch | MicrobatchList | None) -> list[Any]:
        """Return the inputs of the first microbatch as stages take them, in order."""
        inputs, _ = next(iter(_pairs(batch))) or (None, None)
        values = [] if inputs is None else self._arguments("inputs", inputs)
        if isinstance(batch, MicrobatchList):
            return values
        return [v.chunk(self._count)[0] if v is not None and v.dim() else v for v in values]

    def number_of(self, path: str) -> int:
        """Return the position of an input or target among all inputs or targets, from its path."""
        index = re.match(r"(?:inputs|targets)\[([^\]]*)\]", path)
        if index is None:
            return 0
        text = index[1]
        if text.isdigit():
            return int(text)
        return self._names.index(text[1:-1]) if self._names else 0

    def requiring_grad(self, batch: Batch | MicrobatchList | None) -> dict[BatchSlot, list[Tensor]]:
        """Return the batch's tensors that need a gradient, by slot. A slot has one tensor for a
        batch, and one for each microbatch of a list. ``check_batch`` must have accepted the batch.

        Raises:
            PipelineError: no stage of this rank uses one of these tensors, or another input is an
                object.
        """
        tensors: dict[BatchSlot, list[Tensor]] = {}
        for pair in _pairs(batch):
            for (name, used), part in zip(self._used.items(), pair or (), strict=False):
                if part is None:
                    continue
                leaves = self._by_path(name, part)
                arguments = self._arguments(name, part)
                if len(leaves) != len(arguments) and any(map(_requires_grad, leaves.values())):
                    raise PipelineError(
                        f"a tensor of the batch's {name} needs a gradient, beside an object that "
                        "is not a tensor: pass only tensors, or pass x.detach()"
                    )
                for number, tensor in enumerate(arguments):
                    if not _requires_grad(tensor):
                        continue
                    if used is not None and number not in used:
                        path = [*leaves][number]
                        raise PipelineError(
                            f"the batch's {path} needs a gradient, and no stage of this rank uses "
                            "it: pass it detached (x.detach()) or leave it out (None) here, and "
                            "pass it with requires_grad on the rank whose stage uses it"
                        )
                    tensors.setdefault((name, number), []).append(tensor)
        return tensors

    def _top_values(self, name: str, part: Any) -> Mapping[str, Any]:
        """Return the values of a part by path, in order; None for one that was left out."""
        if name == "inputs" and self._names and isinstance(part, Mapping):
            return {f"inputs[{key!r}]": part.get(key) for key in self._names}
        if isinstance(part, tuple | list):
            return {f"{name}[{number}]": value for number, value in enumerate(part)}
        return {name: part}

    def _arguments(self, name: str, part: Any) -> list[Any]:
        """Return the values of a part in order, as stages or the loss take them."""
        if name == "inputs" and self._flattens:
            return [*self._by_path(name, part).values()]
        return [*self._top_values(name, part).values()]

    def check_batch(self, batch: Batch | MicrobatchList | None) -> dict[str, Any]:
        """Check a batch or a list of microbatches, and return all tensors and numbers that this
        rank has passed, by path.

        Raises:
            PipelineError: inputs or targets that this rank uses are missing; a batch is not made of
                tensors or cannot be cut; or a microbatch of a list has another structure than the
                first.
        """
        if not isinstance(batch, MicrobatchList):
            return self._check_pair(batch, cuts=True)
        if batch.beside_batch:
            raise PipelineError(
                "a step takes a batch or microbatches, and got both: pass "
                "step(microbatches=[(inputs, targets), ...]) alone, with the targets in the pairs"
            )
        if not isinstance(batch.batches, tuple | list) or not batch.batches:
            raise PipelineError(
                "microbatches must be a list of pairs (inputs, targets), at least one, in place of "
                f"a batch; got {kind(batch.batches)}"
            )
        checked, first = dict[str, Any](), dict[str, Any]()
        for number, pair in enumerate(batch.batches):
            try:
                leaves = self._check_pair(pair, cuts=False)
            except PipelineError as error:
                raise PipelineError(f"microbatches[{number}]: {error}") from error
            first = first or leaves
            check_alike(number, leaves, first)
            checked |= {f"microbatches[{number}].{path}": leaf for path, leaf in leaves.items()}
        return checked

    def _check_pair(self, batch: Any, *, cuts: bool) -> dict[str, Any]:
        """Check that a batch is a pair with the inputs and targets that this rank uses, and return
        its leaves by path. With ``cuts``, the batch must be made of tensors.
        """
        if batch is None:
            batch = None, None
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise PipelineError(
                with_code(
                    f"a batch is a pair (inputs, targets); got {kind(batch)}. Either part is a "
                    "tensor or a tuple of tensors. For a model that computes its own loss, call "
                    "step({...}, target=())",
                    wrong="trainer.step(x)",
                    right="trainer.step(x, target=y)",
                )
            )
        checked = dict[str, Any]()
        for (name, used), part in zip(self._used.items(), batch, strict=True):
            if part is None:
                if used is None or used:
                    raise PipelineError(
                        f"a stage of this rank uses the batch's {name}; got None: pass the batch's "
                        f"{name} on this rank"
                    )
                continue
            leaves, values = self._by_path(name, part), self._top_values(name, part)
            for path, value in values.items():
                if cuts and (value is not None or name == "targets" or used is None):
                    check_cuttable(name, path, value, self._count)
            check_complete(leaves, used or (), self._names)
            for path, leaf in leaves.items():
                if isinstance(leaf, Tensor):
                    check_has_data(path, leaf, self._device)
            # None stands for an input that this rank leaves out.
            checked |= {p: v for p, v in leaves.items() if v is not None or p not in values}
        return checked

    def _by_path(self, name: str, part: Any) -> Mapping[str, object]:
        """Return the tensors and numbers of a part by path, in order; None for one that was left
        out.
        """
        if name == "inputs" and self._names and isinstance(part, Mapping):
            part = _with_leaves(part, self._names)
            unknown = [key for key in part if key not in self._names]
            if unknown:
                raise PipelineError(
                    f"the batch's inputs have the unknown name {unknown[0]!r}; the model was cut "
                    f"with the inputs {', '.join(self._names)}: pass inputs by these names"
                )
        values = self._top_values(name, part)
        if name == "inputs" and self._flattens and not self._names:
            tensors = [
                leaf
                for value in values.values()
                for _, leaf in flatten_named("", value)
                if leaf is None or isinstance(leaf, Tensor)
            ]
            return {f"inputs[{number}]": tensor for number, tensor in enumerate(tensors)}
        leaves: dict[str, object] = {}
        for path, value in values.items():
            is_leaf = value is None or isinstance(value, Tensor)
            leaves |= {path: value} if is_leaf else dict(flatten_named(path, value))
        return leaves


def _with_leaves(part: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return named inputs, in which the tensors of each object replace the object, under the
    tensors' own names.
    """
    leaves: dict[str, Any] = {}
    for key, value in part.items():
        if key in names or value is None or isinstance(value, Tensor):
            leaves[key] = value
        else:
            leaves |= {p: v for p, v in flatten_named(key, value) if isinstance(v, Tensor)}
    return leaves


def _pairs(batch: Batch | MicrobatchList | None) -> Sequence[Any]:
    """The pairs (inputs, targets) of a list of microbatches; or a list with only the batch."""
    return batch.batches or () if isinstance(batch, MicrobatchList) else [batch]


def _requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def signature(batch: object) -> Hashable:
    """Return a hashable key of a batch on this rank: its shapes, dtypes and structure."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype, batch.requires_grad, batch.layout, batch.is_meta
    if isinstance(batch, Mapping):
        return tuple([(name, signature(part)) for name, part in batch.items()])
    if isinstance(batch, tuple | list):
        return tuple(map(signature, batch))
    if isinstance(batch, MicrobatchList):
        return (MicrobatchList, batch.beside_batch, signature(batch.batches))
    if batch is None or isinstance(batch, str | int | float | bool):
        return type(batch).__name__, repr(batch)
    leaves, spec = tree_flatten(batch)
    if len(leaves) == 1 and leaves[0] is batch:
        return type(batch).__name__
    return spec, tuple(map(signature, leaves))


def tensors_of(batch: Microbatches) -> list[Tensor | None]:
    """The tensors of microbatches, also those inside of objects; None where there is none."""
    tensors: list[Tensor | None] = []
    for microbatch in batch:
        for value in microbatch:
            leaves = [value] if value is None or type(value) is Tensor else tree_flatten(value)[0]
            tensors += [leaf for leaf in leaves if leaf is None or isinstance(leaf, Tensor)]
    return tensors


def deliver_gradients(
    tensors: Mapping[BatchSlot, Sequence[Tensor]],
    gradients: Mapping[BatchSlot, Mapping[int, Tensor]],
    count: int,
    divisor: float,
) -> None:
    """Run the user's backward from the batch's tensors, as ``backward()`` of the step's loss would
    do.

    Args:
        tensors: the tensors that need a gradient: one of the whole batch, or one for each
            microbatch of a list.
        gradients: by microbatch, the gradients of the step's loss. Microbatches whose loss does not
            depend on the tensor are missing.
        count: the number of microbatches.
        divisor: the number of replicas over which the step's loss is the mean, times the scale of
            the losses.
    """
    roots, totals = list[Tensor](), list[Tensor]()
    for slot, (tensor, *rest) in tensors.items():
        by_microbatch = gradients.get(slot)
        if not by_microbatch:
            continue
        if rest:
            pairs = [([tensor, *rest][number], total) for number, total in by_microbatch.items()]
        elif tensor.dim() and count > 1:
            sizes = chunk_sizes(len(tensor), count)
            zeros = next(iter(by_microbatch.values())).new_zeros
            chunks = [
                by_microbatch[number] if number in by_microbatch else zeros(size, *tensor.shape[1:])
                for number, size in enumerate(sizes)
            ]
            pairs = [(tensor, torch.cat(chunks))]
        else:
            pairs = [(tensor, torch.stack([*by_microbatch.values()]).sum(0))]
        for root, total in pairs:
            roots.append(root)
            totals.append((total / divisor if divisor != 1 else total).to(root.device))
    if roots:
        torch.autograd.backward(roots, totals)
