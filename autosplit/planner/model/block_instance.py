"""Blocks of a model as a Stage with state of its own, ready to be traced or run."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from autosplit.pipeline.engine.shapes import Part
from autosplit.pipeline.training.stage_modules import LossFunction, WithAutocast, WithLoss
from autosplit.runtime.activations.saved_tensors import TensorSpec
from autosplit.runtime.split_options import SplitOptions
from autosplit.stage import Stage
from autosplit.torch_internals.pytree import tree_flatten

_SMALL = 2**16  # bytes below which a tensor may as well have memory
_SCALE = 0.02  # of random parameters: small enough that no block overflows


class NamedBlock(Protocol):
    """A part of the model that is never cut.

    Attributes:
        name: where in the model it comes from.
        signature: equal for blocks of equal structure and shapes.
    """

    @property
    def name(self) -> str: ...

    @property
    def signature(self) -> Hashable: ...


class BlockSequence(Protocol):
    """A model in blocks, as profiles and estimates take it.

    Attributes:
        blocks: in order.
        crossing: for each cut between two blocks, the tensors that go over it (values are not
            looked at).
    """

    @property
    def blocks(self) -> Sequence[NamedBlock]: ...

    @property
    def crossing(self) -> Sequence[Sequence[Tensor]]: ...

    def segment(self, first: int, last: int) -> tuple[nn.Module, Sequence[Tensor]]:
        """Blocks ``first`` up to but not ``last`` as a module, and what its arguments look like."""
        ...


@dataclass(frozen=True)
class StageOptions:
    """How stages are made of blocks: a trainer's options that decide what a stage costs.

    Attributes:
        split: how blocks are split and their graphs are run.
        autocast: the dtype of autocast, or None.
        loss_fn: belongs to the last block where it is given; it needs ``targets``.
        targets: of one microbatch.
        device: where blocks run; None for where their parameters are, or the CPU.
    """

    split: SplitOptions = field(default_factory=SplitOptions)
    autocast: torch.dtype | None = None
    loss_fn: LossFunction | None = None
    targets: Part | None = None
    device: torch.device | None = None


@dataclass
class BlockInstance:
    """Some blocks as a stage, with state of its own: running it leaves the model as it is.

    Attributes:
        stage: the stage.
        inputs: its arguments; with ``blank``, large ones without memory.
        parameter_bytes: of its parameters, each counted once.
    """

    stage: Stage
    inputs: list[Tensor]
    parameter_bytes: int


def distinct(whole: BlockSequence, options: StageOptions) -> dict[Hashable, list[int]]:
    """The blocks that cost the same, by what they have in common.

    The first block is by itself, because it has no input gradient, and so is a last one with a
    loss.
    """
    found: dict[Hashable, list[int]] = {}
    last = len(whole.blocks) - 1
    for index, block in enumerate(whole.blocks):
        ends = index == last and options.loss_fn is not None
        found.setdefault((block.signature, index == 0, ends), []).append(index)
    return found


def prepare_blocks(
    whole: BlockSequence, first: int, last: int, options: StageOptions, *, blank: bool = False
) -> BlockInstance:
    """Blocks ``first`` up to but not ``last`` as a stage.

    Parameters on the meta device become random ones; others are used as they are. Buffers are
    copied.

    Args:
        whole: the model.
        first: the first block.
        last: the one after the last block.
        options: how stages are made.
        blank: trace only: neither parameters nor inputs have memory, unless they are small.

    Raises:
        CaptureError: the blocks cannot be traced.
        SplitError: their graph cannot be split, or a bad option.
    """
    module, examples = whole.segment(first, last)
    device = options.device or device_of(module)
    own_state(module, device, blank=blank)
    module.to(device)  # what it makes itself, too
    size = sum(math.prod(p.shape) * p.element_size() for p in module.parameters())
    inputs = [_make(example, device, blank, scale=1.0) for example in examples]
    if last == len(whole.blocks) and options.loss_fn is not None:
        targets = options.targets
        parts = [targets] if isinstance(targets, Tensor) else list(targets or ())
        count = None if isinstance(targets, Tensor) else len(parts)
        module = WithLoss(module, options.loss_fn, count)
        inputs += [part.detach().to(device) for part in parts]
    elif last == len(whole.blocks):
        module = _TensorsOnly(module)
    if options.autocast is not None:
        module = WithAutocast(module, device, options.autocast)
    split = replace(options.split, late_input=True)  # as a trainer's
    stage = Stage(module, inputs, index=first, **vars(split))
    return BlockInstance(stage, inputs, size)


class _TensorsOnly(nn.Module):
    """A model's last blocks without what else the model puts out, such as None for a loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        leaves, _ = tree_flatten(self.module(*args))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def own_state(
    module: nn.Module, device: torch.device, *, blank: bool, gradients: bool = False
) -> None:
    """Give the module buffers of its own on ``device``, and parameters where it has none there.

    What is tied stays tied. With ``gradients``, it also gets parameters of its own, with the
    memory of those it had, so that gradients reach nobody else.
    """
    made: dict[int, Tensor] = {}
    for owner in module.modules():
        for name, parameter in [*owner.named_parameters(recurse=False, remove_duplicate=False)]:
            there = parameter.device == device and not blank
            if there and not gradients:
                continue
            if id(parameter) not in made:
                values = (
                    parameter.detach()
                    if there
                    else _make(parameter, device, blank, _SCALE).detach()
                )
                made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            setattr(owner, name, made[id(parameter)])
        for name, buffer in [*owner.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(buffer) not in made:
                known = not (buffer.is_meta or blank)
                made[id(buffer)] = (
                    buffer.detach().to(device, copy=True)
                    if known
                    else _make(buffer, device, blank, None)
                )
            setattr(owner, name, made[id(buffer)])


def device_of(module: nn.Module) -> torch.device:
    """Where the module runs: where its first real parameter is, or the CPU."""
    real = (parameter.device for parameter in module.parameters() if not parameter.is_meta)
    return next(real, torch.device("cpu"))


def _make(example: Tensor, device: torch.device, blank: bool, scale: float | None) -> Tensor:
    """A tensor like ``example``: random floats of this scale, ones where it is None; integers are
    zero, which is a valid index into anything.
    """
    spec = TensorSpec.of(example)
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    # Capturing may read small integers, such as a count of batches.
    if blank and tensor.nbytes > _SMALL:
        tensor.untyped_storage().resize_(0)
    elif tensor.dtype is torch.bool or (tensor.is_floating_point() and scale is None):
        tensor.fill_(1)
    elif tensor.is_floating_point() and scale is not None:
        tensor.normal_(std=scale)
    else:
        tensor.zero_()
    return tensor.requires_grad_(example.requires_grad)
