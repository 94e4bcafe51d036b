"""Costs of the blocks of a model. One block of each kind is split as a stage. Its F, I and W are
timed, or estimated from the FLOPs and bytes of its graphs.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from autosplit.device import generators_kept, settle
from autosplit.errors import CaptureError, PlanError, SplitError, reworded
from autosplit.mesh.costs import DeviceSpeed, measure_device
from autosplit.passes.analysis.operator_cost import flops, traffic, value_bytes
from autosplit.pipeline.engine.autocast import WithAutocast
from autosplit.pipeline.ledger.prediction import footprint
from autosplit.planner.captured_model import WholeModel, device_of
from autosplit.planner.meta_model import assign, named_tensors
from autosplit.runtime.options import SplitOptions
from autosplit.stage import Stage

_SMALL = 2**16  # bytes below which a tensor may as well have memory
_SCALE = 0.02  # of random parameters: small enough that no block overflows
_WARMUP, _LEAST, _MOST = 2, 3, 50  # rounds that are not timed, and at least and at most timed

Times = tuple[float, float, float]
"""Seconds of F, I and W of one microbatch."""


@dataclass(frozen=True)
class BlockCost:
    """The cost of one block, or of several blocks in one stage, for one microbatch.

    Attributes:
        forward: seconds of F.
        backward_input: seconds of I.
        backward_weight: seconds of W.
        saved: bytes kept from F to the backward.
        deferred: bytes kept from I to W.
        parameters: bytes of parameters.
    """

    forward: float
    backward_input: float
    backward_weight: float
    saved: float
    deferred: float
    parameters: float

    @property
    def times(self) -> Times:
        """(seconds of F, of I, of W)."""
        return (self.forward, self.backward_input, self.backward_weight)


@dataclass(frozen=True)
class ModelCosts:
    """The costs of all blocks of a model, in order.

    Attributes:
        blocks: the cost of each block.
        crossing: bytes of one microbatch that cross the cut after each block except the last.
    """

    blocks: tuple[BlockCost, ...]
    crossing: tuple[float, ...]

    @property
    def plain(self) -> dict[str, Any]:
        """The costs as tuples of numbers, from which ``ModelCosts.of`` rebuilds them."""
        return {"blocks": [*map(astuple, self.blocks)], "crossing": self.crossing}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> ModelCosts:
        """Costs from the tuples that ``ModelCosts.plain`` returned.

        Raises:
            PlanError: ``plain`` has another form.
        """
        try:
            blocks = tuple(BlockCost(*map(float, numbers)) for numbers in plain["blocks"])
            return cls(blocks, tuple(map(float, plain["crossing"])))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"costs are 'profile', 'estimate', a ModelCosts, or what a plan's arguments have "
                f"under 'costs'; got {plain!r:.60}"
            ) from error

    @cached_property
    def _fields(self) -> list[tuple[float, ...]]:
        """Each field of ``BlockCost``, over all blocks."""
        return [*zip(*map(astuple, self.blocks), strict=True)]

    def stage(self, first: int, last: int) -> BlockCost:
        """The cost of blocks ``first`` to ``last - 1`` as one stage.

        A first stage has no I; its W is the whole backward. So the first stage keeps all saved
        tensors, and the gradient of its output, until W. The last stage sends no outputs.
        """
        cost = BlockCost(*(sum(values[first:last]) for values in self._fields))
        if first:
            return cost
        return replace(
            cost,
            backward_input=0.0,
            backward_weight=cost.backward_input + cost.backward_weight,
            deferred=cost.saved + sum(self.crossing[last - 1 : last]),
        )


@dataclass(frozen=True)
class BlockOptions:
    """How stages are made of blocks: the options of a trainer that decide the cost of a stage.

    Attributes:
        split: how blocks are split and their graphs are run.
        autocast: the dtype of autocast, or None.
        device: the device of the blocks; None: the device of their parameters, or the CPU.
    """

    split: SplitOptions = field(default_factory=SplitOptions)
    autocast: torch.dtype | None = None
    device: torch.device | None = None


_DEFAULT = BlockOptions()


def profile(
    whole: WholeModel, options: BlockOptions = _DEFAULT, *, seconds: float = 60.0
) -> ModelCosts:
    """Time F, I and W of one block of each kind, as medians of warm runs.

    The model's state, random generators and ``.grad`` are not changed.

    Args:
        whole: the model in blocks, for one microbatch.
        options: how stages are made of blocks; a trainer's defaults.
        seconds: the time to measure all kinds of blocks together, without tracing.

    Raises:
        CaptureError: a block cannot be traced.
        SplitError: a block's graph cannot be split, or an option has a wrong value.
    """
    members = kinds(whole)
    with generators_kept():
        stages = [block_stage(whole, indices[0], indices[0] + 1, options) for indices in members]
        timed = time_stages(stages, seconds)
    block_costs = [_cost(stage, times) for (stage, _), times in zip(stages, timed, strict=True)]
    return _model_costs(whole, members, block_costs)


def estimate(
    whole: WholeModel, options: BlockOptions = _DEFAULT, *, device: DeviceSpeed | None = None
) -> ModelCosts:
    """Estimate F, I and W of one block of each kind, from the FLOPs and bytes of its graphs.

    A block of each kind is traced and split as a stage would be, on tensors without memory. So its
    saved and deferred bytes are exact, also for a model on the meta device. Only the seconds are
    estimates, operator by operator. With the meta device as ``options.device``, a model can be
    planned on a machine that lacks the target device. Torch then chooses kernels for no particular
    device, for which attention saves its probabilities.

    Args:
        whole: the model in blocks, for one microbatch.
        options: how stages are made of blocks; a trainer's defaults. Backends are taken to be
            equally fast.
        device: the speed of operators; None: measure the CPU, which takes a second.

    Raises:
        CaptureError: a block cannot be traced.
        SplitError: a block's graph cannot be split, or an option has a wrong value.
    """
    options = replace(options, split=replace(options.split, backend="eager"))
    speed = device or measure_device()
    members = kinds(whole)

    def cost(block: int) -> BlockCost:
        stage, _ = block_stage(whole, block, block + 1, options, blank=True)
        graphs = stage.functions.graphs
        parts = (graphs.forward, graphs.backward_input, graphs.backward_weight)
        forward, inputs, weights = (_graph_seconds(graph, speed) for graph in parts)
        return _cost(stage, (forward, inputs, weights))

    return _model_costs(whole, members, [cost(indices[0]) for indices in members])


def _graph_seconds(graph: fx.GraphModule | None, device: DeviceSpeed) -> float:
    """Estimated seconds of one call of a graph; views take no time."""
    if graph is None:
        return 0.0
    moved = ((node, traffic(node)) for node in graph.graph.nodes)
    return sum(device.seconds(flops(node), size) for node, size in moved if size)


def kinds(whole: WholeModel) -> list[list[int]]:
    """Groups of blocks with equal costs, each a list of block numbers. The first block has no input
    gradient, so it is a group of its own.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, block in enumerate(whole.blocks):
        groups.setdefault((block.signature, index == 0), []).append(index)
    return [*groups.values()]


def _cost(stage: Stage, times: Times) -> BlockCost:
    forward, inputs, weights = times
    if stage.index == 0:
        inputs, weights = 0.0, inputs + weights
    size = sum(p.numel() * p.element_size() for p in stage.module.parameters())
    return BlockCost(forward, inputs, weights, *footprint(stage), size)


def _model_costs(
    whole: WholeModel, members: list[list[int]], block_costs: Iterable[BlockCost]
) -> ModelCosts:
    blocks = {
        index: cost for indices, cost in zip(members, block_costs, strict=True) for index in indices
    }
    crossing = tuple(float(sum(map(value_bytes, tensors))) for tensors in whole.crossing)
    return ModelCosts(tuple(blocks[index] for index in sorted(blocks)), crossing)


def block_stage(
    whole: WholeModel, first: int, last: int, options: BlockOptions, *, blank: bool = False
) -> tuple[Stage, list[Tensor]]:
    """Build blocks ``first`` to ``last - 1`` as a stage with a copy of the state, so that running
    the stage does not change the model. Return (stage, its inputs).

    Parameters on the meta device become random parameters; other parameters are used unchanged.
    Buffers are copied.

    Args:
        whole: the model.
        first: the first block.
        last: the block after the last block.
        options: how stages are made.
        blank: whether the stage is only traced; then neither parameters nor inputs have memory,
            unless they are small.

    Raises:
        CaptureError: the blocks cannot be traced.
        SplitError: the blocks' graph cannot be split, or an option has a wrong value.
    """
    module, examples = whole.segment(first, last)
    device = options.device or device_of(module)
    copies: dict[int, Tensor] = {}
    for name, tensor in named_tensors(module).items():
        if id(tensor) not in copies:
            dtype = whole.precision.dtype_of(tensor)
            copies[id(tensor)] = _private_copy(tensor, dtype, device, blank)
        assign(module, name, copies[id(tensor)])
    module.to(device)  # and the tensors that it makes itself
    inputs = [_make(example, device, blank, scale=1.0) for example in examples]
    if options.autocast is not None:
        module = WithAutocast(module, device, options.autocast)
    try:
        return Stage(module, inputs, index=first, options=options.split.in_pipeline()), inputs
    except (CaptureError, SplitError) as error:
        # The number is a block's, not that of a stage that the user knows.
        block = f"block {whole.blocks[first].name!r} of {type(whole.model).__name__}"
        raise reworded(error, str(error).replace(f"stage {first}", block, 1)) from error


def _private_copy(tensor: Tensor, dtype: torch.dtype, device: torch.device, blank: bool) -> Tensor:
    has_values = not (tensor.is_meta or blank)
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().to(device, copy=True) if has_values else _make(tensor, device, blank)
    in_place = has_values and tensor.device == device
    values = tensor if in_place else _make(tensor, device, blank, _SCALE, dtype)
    return nn.Parameter(values.detach().to(dtype), tensor.requires_grad)


def _make(
    example: Tensor,
    device: torch.device,
    blank: bool,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor with the layout of ``example``. Floats are random with this scale, or ones if
    ``scale`` is None. Integers are zero, which is always a valid index.
    """
    tensor = torch.empty_strided(
        example.shape, example.stride(), dtype=dtype or example.dtype, device=device
    )
    # Capturing may read small integers, such as a count of batches.
    if blank and tensor.nbytes > _SMALL:
        tensor.untyped_storage().resize_(0)
    elif tensor.is_floating_point() and scale is not None:
        tensor.normal_(std=scale)
    else:
        tensor.fill_(tensor.is_floating_point() or tensor.dtype is torch.bool)
    return tensor.requires_grad_(example.requires_grad)


def time_stages(stages: list[tuple[Stage, list[Tensor]]], seconds: float) -> list[Times]:
    """Run microbatches through stages often enough for stable medians; return (F, I, W) seconds of
    each stage.

    All stages run F, then all run I from the last to the first, then all run W, as one pipeline
    would. Another microbatch is always in flight. So saved tensors have left the cache when the
    backward reads them, and the allocator always has memory to reuse. If all memory were freed at
    times, the allocator would return it to the system and map it again page by page, which may take
    as long as the computation. Because stages take turns, other load of the machine affects all
    alike. Gradients are summed over the rounds as over the microbatches of a step.

    Args:
        stages: (stage, inputs) pairs.
        seconds: the time after which to stop, if each stage has run a few times.
    """
    device = next((inputs[0].device for _, inputs in stages if inputs), torch.device("cpu"))
    took: dict[tuple[Stage, str], list[float]] = defaultdict(list)

    def clock(stage: Stage, call: str, microbatch: int, *arguments: list[Tensor | None]) -> None:
        settle(device)
        start = time.perf_counter()
        getattr(stage, call)(microbatch, *arguments)
        settle(device)
        took[stage, call].append(time.perf_counter() - start)

    started = 0.0
    for number in range(-1, _WARMUP + _MOST):
        if number == _WARMUP:
            took.clear()
            started = time.perf_counter()
        for stage, inputs in stages:
            # A stage's inputs have just been computed, and nobody else reads them.
            clock(stage, "forward", number + 1, [tensor.detach().clone() for tensor in inputs])
        if number < 0:
            continue
        for stage, _ in reversed(stages):
            clock(stage, "backward_input", number, _gradients(stage, device))
        for stage, _ in reversed(stages):
            clock(stage, "backward_weight", number)
        if number >= _WARMUP + _LEAST and time.perf_counter() - started > seconds:
            break
    return [
        (
            statistics.median(took[stage, "forward"]),
            statistics.median(took[stage, "backward_input"]),
            statistics.median(took[stage, "backward_weight"]),
        )
        for stage, _ in stages
    ]


def _gradients(stage: Stage, device: torch.device) -> list[Tensor | None]:
    return [
        torch.ones(shape, dtype=dtype, device=device) if wanted else None
        for shape, dtype, wanted in stage.output_specs
    ]
