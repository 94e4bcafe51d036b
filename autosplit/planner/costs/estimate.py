"""What the blocks of a model cost, estimated: nothing runs, and no parameter needs memory."""

from __future__ import annotations

from dataclasses import replace

from torch import fx
from tqdm import tqdm

from autosplit.mesh.costs import DeviceSpeed, measure_device
from autosplit.passes.analysis.operator_cost import flops, traffic
from autosplit.pipeline.engine.stages import footprint
from autosplit.planner.model.block_instance import (
    BlockSequence,
    StageOptions,
    distinct,
    prepare_blocks,
)

from .block_costs import BlockCost, ModelCosts
from .profile import crossing_bytes, returning_bytes


def estimate(
    whole: BlockSequence, options: StageOptions | None = None, *, device: DeviceSpeed | None = None
) -> ModelCosts:
    """F, I and W of a block of each kind, from the FLOPs and bytes of its graphs.

    A block of each kind is traced and split as a stage would be, on tensors without memory, so
    what it saves and defers is exact, also for a model on the meta device; only the seconds are
    estimates, operator by operator. With ``options.device`` the meta device, a model is
    planned for a machine without the device at hand: torch then chooses kernels as for no device
    in particular, which have attention save its probabilities.

    Args:
        whole: the model in blocks, for one microbatch.
        options: how stages are made of blocks; None for a trainer's defaults. Backends are
            taken to be equally fast.
        device: how fast operators are; None measures the CPU, which takes a second.

    Raises:
        CaptureError: a block cannot be traced.
        SplitError: a block's graph cannot be split, or a bad option.
    """
    options = options or StageOptions()
    options = replace(options, split=replace(options.split, backend="eager"))
    device = device or measure_device()
    blocks: dict[int, BlockCost] = {}
    # None: shown on a terminal, not in a log file.
    kinds = distinct(whole, options).values()
    for members in tqdm(kinds, desc="estimating", unit="block", disable=None):
        cost = _cost(whole, members[0], options, device)
        blocks |= dict.fromkeys(members, cost)
    return ModelCosts(
        tuple(blocks[index] for index in sorted(blocks)),
        tuple(map(crossing_bytes, whole.crossing)),
        returning=tuple(map(returning_bytes, whole.crossing)),
    )


def graph_seconds(graph: fx.GraphModule | None, device: DeviceSpeed) -> float:
    """How long one call of a graph takes; nothing for views and the like."""
    if graph is None:
        return 0.0
    moved = ((node, traffic(node)) for node in graph.graph.nodes)
    return sum(device.seconds(flops(node), size) for node, size in moved if size)


def _cost(
    whole: BlockSequence, index: int, options: StageOptions, device: DeviceSpeed
) -> BlockCost:
    instance = prepare_blocks(whole, index, index + 1, options, blank=True)
    graphs = instance.stage.functions.graphs
    forward, inputs, weights, backward = (
        graph_seconds(graph, device)
        for graph in (
            graphs.forward,
            graphs.backward_input,
            graphs.backward_weight,
            graphs.backward,
        )
    )
    if index == 0:
        inputs, weights = 0.0, backward
    saved, deferred = footprint(instance.stage)
    return BlockCost(forward, inputs, weights, saved, deferred, instance.parameter_bytes, backward)
