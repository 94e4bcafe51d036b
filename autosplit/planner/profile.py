"""What the blocks of a model cost, measured: each kind of block runs by itself, as a stage."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from autosplit.device import generators_kept, settle
from autosplit.passes.analysis.operator_cost import value_bytes
from autosplit.pipeline.engine.stages import footprint
from autosplit.pipeline.training.batches import Part
from autosplit.pipeline.training.stage_modules import LossFunction, WithAutocast, WithLoss
from autosplit.planner.captured_model import WholeModel, device_of
from autosplit.planner.costs import BlockCost, ModelCosts
from autosplit.planner.meta_model import assign, named_tensors
from autosplit.runtime.split_options import SplitOptions
from autosplit.stage import Stage
from autosplit.torch_internals.pytree import tree_flatten

_SMALL = 2**16  # bytes below which a tensor may as well have memory
_SCALE = 0.02  # of random parameters: small enough that no block overflows


@dataclass(frozen=True)
class BlockOptions:
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


def kinds(whole: WholeModel, options: BlockOptions) -> list[list[int]]:
    """The blocks that cost the same.

    The first block is by itself, because it has no input gradient, and so is a last one with a
    loss.
    """
    found: dict[Hashable, list[int]] = {}
    last = len(whole.blocks) - 1
    for index, block in enumerate(whole.blocks):
        ends = index == last and options.loss_fn is not None
        found.setdefault((block.signature, index == 0, ends), []).append(index)
    return list(found.values())


def model_costs(
    whole: WholeModel,
    members: Sequence[Sequence[int]],
    costs: Iterable[BlockCost],
    call: float = 0.0,
) -> ModelCosts:
    """The costs of a model by those of each kind of block; a mask that crosses has no gradient."""
    blocks = {index: cost for own, cost in zip(members, costs, strict=True) for index in own}
    crossing, returning = (
        tuple(
            float(sum(value_bytes(t) for t in tensors if t.requires_grad or not back))
            for tensors in whole.crossing
        )
        for back in (False, True)
    )
    ordered = tuple(blocks[index] for index in sorted(blocks))
    return ModelCosts(ordered, crossing, call, returning)


def block_cost(
    stage: Stage, forward: float, inputs: float, weights: float, backward: float
) -> BlockCost:
    """What blocks cost with these seconds of F, I, W and B; a first block has no I."""
    if stage.index == 0:
        inputs, weights = 0.0, backward
    size = sum(math.prod(p.shape) * p.element_size() for p in stage.module.parameters())
    return BlockCost(forward, inputs, weights, *footprint(stage), size, backward)


def prepare_blocks(
    whole: WholeModel, first: int, last: int, options: BlockOptions, *, blank: bool = False
) -> tuple[Stage, list[Tensor]]:
    """Blocks ``first`` up to but not ``last`` as a stage with state of its own, so that running it
    leaves the model as it is; and its inputs.

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
    return Stage(module, inputs, index=first, **vars(split)), inputs


class _TensorsOnly(nn.Module):
    """A model's last blocks without what else the model puts out, such as None for a loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        leaves, _ = tree_flatten(self.module(*args))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def own_state(module: nn.Module, device: torch.device, *, blank: bool = False) -> None:
    """Give the module buffers of its own on ``device``, and parameters with the memory of those it
    had there, so that gradients reach nobody else. What is tied stays tied.
    """
    made: dict[int, Tensor] = {}
    for name, tensor in named_tensors(module).items():
        if id(tensor) not in made:
            made[id(tensor)] = _own(tensor, device, blank)
        assign(module, name, made[id(tensor)])


def _own(tensor: Tensor, device: torch.device, blank: bool) -> Tensor:
    known = not (tensor.is_meta or blank)
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().to(device, copy=True) if known else _make(tensor, device, blank)
    there = known and tensor.device == device
    values = tensor if there else _make(tensor, device, blank, _SCALE)
    return nn.Parameter(values.detach(), tensor.requires_grad)


def _make(example: Tensor, device: torch.device, blank: bool, scale: float | None = None) -> Tensor:
    """A tensor like ``example``: random floats of this scale, ones where it is None; integers are
    zero, which is a valid index into anything.
    """
    tensor = torch.empty_strided(
        example.shape, example.stride(), dtype=example.dtype, device=device
    )
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


_WARMUP = 2
_LEAST, _MOST = 3, 50  # timed rounds


_SPLIT = ("forward", "backward_input", "backward_weight")
_FUSED = ("forward", "backward")

Rounds = dict[str, list[float]]
"""Seconds of each call of a stage, round by round; ``backward`` is I and W in one."""


def time_stages(
    subjects: Sequence[tuple[Stage, list[Tensor]]],
    seconds: float,
    progress: Callable[[float], object] = lambda seconds: None,
) -> list[Rounds]:
    """Run microbatches through some stages, so often that medians of their times mean something.

    All run F, then all I from the last to the first, then all W, as if they were one stage, and
    another microbatch is always under way: what F saved is then out of the cache when the backward
    reads it, and memory is found where others left it. If all of it were freed now and then, the
    allocator would give it back to the system and get it anew, page by page, which may take as
    long as what is computed. In turns, what else the machine does meanwhile meets them all alike.
    Gradients add up over the rounds as over the microbatches of a step.

    Args:
        subjects: stages and their inputs.
        seconds: when to stop at the latest, if each has run a few times.
        progress: told how many seconds have gone by since it was last told.
    """
    clocks = [_Clock(stage, inputs) for stage, inputs in subjects]
    for clock in clocks:
        clock.time("forward")
    for _ in range(_WARMUP):
        _round(clocks)
    for clock in clocks:
        clock.rounds.clear()
    start = last = time.perf_counter()
    for number in range(1, _MOST + 1):
        _round(clocks)
        progress(time.perf_counter() - last)
        last = time.perf_counter()
        if number >= _LEAST and last - start > seconds:
            break
    return [clock.rounds for clock in clocks]


def _round(clocks: Sequence[_Clock]) -> None:
    """One microbatch split, and one not, each with another one under way."""
    for call in (*_SPLIT, *_FUSED):
        for clock in clocks if call == "forward" else reversed(clocks):
            clock.time(call)


class _Clock:
    def __init__(self, stage: Stage, inputs: list[Tensor]) -> None:
        self.rounds: Rounds = defaultdict(list)
        self._stage = stage
        self._started = self._done = 0  # microbatches
        self._inputs = [tensor.detach() for tensor in inputs]
        self._device = inputs[0].device if inputs else torch.device("cpu")

    def time(self, call: str) -> None:
        """Run the next call of this kind."""
        method = getattr(self._stage, call)
        if call == "forward":
            # What a stage is given has just been computed, and is its own.
            run = partial(method, self._started, [tensor.clone() for tensor in self._inputs])
            self._started += 1
        else:
            given = () if call == "backward_weight" else (self._grads(),)
            run = partial(method, self._done, *given)
            self._done += call != "backward_input"
        settle(self._device)
        start = time.perf_counter()
        run()
        settle(self._device)
        self.rounds[call].append(time.perf_counter() - start)

    def _grads(self) -> list[Tensor | None]:
        return [
            torch.ones(shape, dtype=dtype, device=self._device) if wanted else None
            for shape, dtype, wanted in self._stage.output_specs
        ]


def profile(
    whole: WholeModel, options: BlockOptions | None = None, *, seconds: float = 60.0
) -> ModelCosts:
    """Time F, I and W of a block of each kind, warm, by medians.

    One block of each kind runs, one after the other as in a stage, see ``time_stages``; those whose
    parameters are on the meta device are made, timed and forgotten one after another. The
    model's state, the random number generators and ``.grad`` stay as they are. Progress is shown
    on a terminal.

    Args:
        whole: the model in blocks, for one microbatch.
        options: how stages are made of blocks; None for a trainer's defaults.
        seconds: how long to measure at the most, all kinds of blocks together; tracing is not
            counted.

    Returns:
        Seconds of blocks without what a call takes whatever the stage holds; that is ``call``.

    Raises:
        CaptureError: a block cannot be traced.
        SplitError: a block's graph cannot be split, or a bad option.
    """
    options = options or BlockOptions()
    members = kinds(whole, options)
    firsts = [own[0] for own in members]
    # Which kinds are in memory at once.
    apart = any(parameter.is_meta for parameter in whole.model.parameters())
    groups = [[each] for each in firsts] if apart else [firsts]
    # None: shown on a terminal, not in a log file.
    with generators_kept(), tqdm(total=seconds, unit="s", disable=None) as bar:
        measured = [
            _measure(whole, group, options, seconds * len(group) / len(firsts), bar.update)
            for group in groups
        ]
    found, calls = zip(*measured, strict=True)
    costs = itertools.chain.from_iterable(found)
    return model_costs(whole, members, costs, statistics.median(calls))


def _measure(
    whole: WholeModel,
    group: Sequence[int],
    options: BlockOptions,
    seconds: float,
    progress: Callable[[float], object],
) -> tuple[list[BlockCost], float]:
    """The costs of some blocks, and the seconds of a call with next to nothing to compute."""
    subjects = [prepare_blocks(whole, first, first + 1, options) for first in group]
    device = subjects[0][1][0].device
    nothing = [torch.ones(1, device=device, requires_grad=True)]
    empty = Stage(_Scale().to(device), nothing, backend=options.split.backend)
    *rounds, least = time_stages([*subjects, (empty, nothing)], seconds, progress)
    call = statistics.fmean(statistics.median(least[each]) for each in _SPLIT)
    costs = []
    for (stage, _), times in zip(subjects, rounds, strict=True):
        medians = (statistics.median(times[each]) for each in (*_SPLIT, "backward"))
        costs.append(block_cost(stage, *(max(each - call, 0.0) for each in medians)))
    return costs, call


class _Scale(nn.Module):
    """The smallest module with an F, an I and a W."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight
