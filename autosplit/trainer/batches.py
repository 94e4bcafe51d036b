"""Check a trainer's batches on one rank, cut them into microbatches, and deliver gradients to their
tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autosplit.errors import PipelineError, with_code

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


def paired(batch: Any, target: BatchPart | None, named: Mapping[str, Tensor]) -> Batch | None:
    """Return a batch as the pair (inputs, targets).

    Args:
        batch: the pair; or only the inputs, with ``target``; or None, with ``named``.
        target: the targets.
        named: the inputs by name.
    """
    if named:
        # A batch beside named inputs becomes a pair that is an error on all ranks.
        batch = named if batch is None else (batch, named)
    return batch if target is None and not named else (batch, target)


class BatchSplitter:
    """Cuts batches into microbatches for one rank.

    Tensors that this rank does not use are checked too, so that a bad batch is an error on every
    rank that passes it.

    Args:
        microbatches: M, the number of microbatches.
        device: the device of the microbatches.
        inputs: positions of the inputs that this rank's stages use; None for all inputs.
        targets: whether this rank has the last stage, which uses the targets.
        names: the names of the inputs, if they may be passed as a dictionary.
    """

    def __init__(
        self,
        microbatches: int,
        device: torch.device,
        *,
        inputs: frozenset[int] | None,
        targets: bool,
        names: Sequence[str] = (),
    ) -> None:
        self._count = microbatches
        self._device = device
        # By part, the numbers of the tensors that are used; None for all.
        self._used = {"inputs": inputs, "targets": None if targets else frozenset()}
        self._names = names

    def split(self, batch: Batch | None) -> tuple[Microbatches, Microbatches]:
        """Cut a batch that ``check_batch`` has accepted; return (inputs by microbatch, targets by
        microbatch).

        Microbatches are views along dimension 0. A part that this rank does not use is an empty
        list.
        """
        inputs, targets = (None, None) if batch is None else batch
        return self._split_part("inputs", inputs), self._split_part("targets", targets)

    def _split_part(self, name: str, part: Any) -> Microbatches:
        used = self._used[name]
        if part is None or (used is not None and not used):
            return []
        chunks: list[Sequence[Tensor | None]] = []
        for number, tensor in enumerate(self._in_order(part)):
            if used is not None and number not in used:
                chunks.append([None] * self._count)
                continue
            moved = tensor.detach().to(self._device, non_blocking=True)
            chunks.append(moved.chunk(self._count) if moved.dim() else [moved] * self._count)
        return [*map(list, zip(*chunks, strict=True))] or [[] for _ in range(self._count)]

    def requiring_grad(self, batch: Batch | None) -> dict[BatchSlot, Tensor]:
        """Return the tensors that need a gradient by slot, of a batch that ``check_batch`` has
        accepted.

        Raises:
            PipelineError: no stage of this rank uses such a tensor.
        """
        tensors = {}
        for (name, used), part in zip(self._used.items(), batch or (), strict=False):
            for number, (path, tensor) in enumerate(self._by_path(name, part).items()):
                if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                    continue
                if used is not None and number not in used:
                    raise PipelineError(
                        f"the batch's {path} needs a gradient, and no stage of this rank uses it: "
                        "pass it detached (x.detach()) or leave it out (None) here, and pass it "
                        "with requires_grad on the rank whose stage uses it"
                    )
                tensors[name, number] = tensor
        return tensors

    def _in_order(self, part: Any) -> Sequence[Any]:
        if isinstance(part, Mapping):
            return [part.get(name) for name in self._names]
        return part if isinstance(part, tuple | list) else [part]

    def check_batch(self, batch: Batch | None) -> dict[str, Tensor]:
        """Check a batch, and return all tensors that this rank has passed, by path.

        Raises:
            PipelineError: a part that this rank uses is missing, is not made of tensors, or cannot
                be cut into equal microbatches.
        """
        if batch is None:
            batch = None, None
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise PipelineError(
                with_code(
                    f"a batch is a pair (inputs, targets); got {_kind(batch)}. Either part is a "
                    "tensor or a tuple of tensors. For a model that computes its own loss, call "
                    "step({...}, target=())",
                    wrong="trainer.step(x)",
                    right="trainer.step(x, target=y)",
                )
            )
        checked = {}
        for (name, used), part in zip(self._used.items(), batch, strict=True):
            if part is None:
                if used is None or used:
                    raise PipelineError(
                        f"a stage of this rank uses the batch's {name}; got None: pass the batch's "
                        f"{name} on this rank"
                    )
                continue
            tensors = self._by_path(name, part)
            self._check_complete(tensors, used or ())
            for path, tensor in tensors.items():
                if tensor is not None or name == "targets" or used is None:
                    checked[path] = self._check_tensor(name, path, tensor)
        return checked

    def _check_complete(self, tensors: Mapping[str, object], used: Iterable[int]) -> None:
        """Raise PipelineError if an input that a stage of this rank uses was left out."""
        present = [tensor is not None for tensor in tensors.values()]
        for number in sorted(used):
            if number >= len(present) or not present[number]:
                wanted = repr(self._names[number]) if self._names else f"number {number}"
                raise PipelineError(
                    f"a stage of this rank uses the batch's input {wanted}, which is missing; got "
                    f"{sum(present)} inputs"
                )

    def _by_path(self, name: str, part: Any) -> Mapping[str, object]:
        """Return the tensors of a part by path, in order; None for a tensor that was left out."""
        if name == "inputs" and self._names and isinstance(part, Mapping):
            unknown = [key for key in part if key not in self._names]
            if unknown:
                raise PipelineError(
                    f"the batch's inputs have the unknown name {unknown[0]!r}; the model was cut "
                    f"with the inputs {', '.join(self._names)}"
                )
            return {f"inputs[{key!r}]": part.get(key) for key in self._names}
        if isinstance(part, tuple | list):
            return {f"{name}[{number}]": tensor for number, tensor in enumerate(part)}
        return {name: part}

    def _check_tensor(self, name: str, path: str, tensor: object) -> Tensor:
        """Return a tensor whose samples make equal microbatches, or that has no dimensions.

        Raises:
            PipelineError: the tensor cannot be cut into equal microbatches, or is no tensor.
        """
        if isinstance(tensor, Mapping):
            if name == "targets":
                values = ", ".join(f"{path}[{key!r}]" for key in tensor)
                raise PipelineError(
                    f"expected a tensor for the batch's {path}, got a dictionary: "
                    "loss_fn(output, targets) gets a tensor, or a tuple of tensors in the order in "
                    f"which they are passed: target={values if len(tensor) == 1 else f'({values})'}"
                )
            raise PipelineError(
                f"the batch's {name} have names ({', '.join(map(str, tensor))}), and this trainer "
                "takes them in order: step((x, y), target=z). To pass inputs by name, cut the "
                "model with an example that is a dictionary"
            )
        if not isinstance(tensor, Tensor):
            advice = ": torch.from_numpy(array) makes a tensor on the array's memory"
            raise PipelineError(
                f"the batch's {name} must be a tensor or a tuple of tensors; "
                f"got a {type(tensor).__name__}{advice if hasattr(tensor, '__array__') else ''}"
            )
        rows = len(tensor) if tensor.dim() else self._count
        if rows == 0 or rows % self._count:
            fitting = max(rows // self._count, 1) * self._count
            raise PipelineError(
                f"the batch's {path} has shape {list(tensor.shape)}: {rows} samples along "
                f"dimension 0 cannot be cut into {self._count} equal microbatches; pass "
                f"{fitting} or another multiple of {self._count}"
            )
        return tensor


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"


def signature(batch: object) -> Hashable:
    """Return a hashable key of a batch on this rank: its shapes, dtypes and structure."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype, batch.requires_grad
    if isinstance(batch, Mapping):
        return tuple([(name, signature(part)) for name, part in batch.items()])
    if isinstance(batch, tuple | list):
        return tuple(map(signature, batch))
    return None if batch is None else type(batch).__name__


def deliver_gradients(
    tensors: Mapping[BatchSlot, Tensor],
    gradients: Mapping[BatchSlot, Mapping[int, Tensor]],
    count: int,
    divisor: float,
) -> None:
    """Run backward from tensors of a batch, as ``backward()`` of the step's loss would do.

    Args:
        tensors: the tensors that need a gradient.
        gradients: by slot and microbatch, the gradients of the mean loss over microbatches.
            Microbatches whose loss does not depend on the tensor are missing; zeros stand for their
            gradient.
        count: the number of microbatches.
        divisor: the number of replicas over which the step's loss is the mean, times the scale of
            the losses.
    """
    roots, totals = [], []
    for slot, tensor in tensors.items():
        if by_microbatch := gradients.get(slot):
            zeros = torch.zeros_like(next(iter(by_microbatch.values())))
            chunks = [by_microbatch.get(microbatch, zeros) for microbatch in range(count)]
            total = torch.cat(chunks) if tensor.dim() else torch.stack(chunks).sum(0)
            roots.append(tensor)
            totals.append((total / divisor if divisor != 1 else total).to(tensor.device))
    if roots:
        torch.autograd.backward(roots, totals)
