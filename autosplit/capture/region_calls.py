"""The calls of blocks in a model's joint graph: found, checked, and bound to their graphs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autosplit.capture.input_sizes import sizes_within
from autosplit.capture.region import ANCHOR, BlockRegion, RegionCall, new_anchor
from autosplit.capture.region_session import RegionSession, is_plain
from autosplit.errors import CaptureError
from autosplit.passes import Kind, SplitGraphs
from autosplit.passes.analysis.aliasing import storage_root
from autosplit.passes.graph import inputs, outputs
from autosplit.torch_internals.pytree import tree_flatten

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture

SplitBlock = Callable[
    [str, nn.Module, tuple[Any, ...], dict[str, Any], Collection[str]],
    tuple["Capture", SplitGraphs],
]
"""Captures and splits a block for one of its calls. The first argument is the name of the block's
kind, the last one has the paths of results without a gradient.
"""


def capture_region(
    split: SplitBlock,
    kind: str,
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[Any],
    detached: Collection[str],
) -> BlockRegion:
    """Capture and split a block, see ``CaptureBlock``.

    Raises:
        CaptureError: the block cannot be captured separately.
    """
    capture, graphs = split(kind, block, args, kwargs, detached)
    within = sizes_within(capture.sizes, leaves)
    region = BlockRegion(args, kwargs, capture.guards, kind, capture, graphs, within)
    refuse_uncallable(region)
    return region


def refuse_uncallable(region: BlockRegion) -> None:
    """Raise if other graphs cannot call F, I and W of a block.

    Raises:
        CaptureError: the block depends on state that Dynamo's guards do not check, writes into its
            inputs, returns an input first or a view of one, or takes or returns values that are not
            tensors.
    """
    capture, graphs = region.capture, region.graphs
    if not capture.guards.has_only_dynamo_guards:
        raise CaptureError(
            "the block reads tensors other than its inputs and state, or sets attributes"
        )
    if capture.shardings:
        raise CaptureError("the block works on DTensors")
    for role, _ in outputs(graphs.joint.graph, Kind.UPDATE):
        if role.name in capture.inputs:
            raise CaptureError(
                f"the block writes into its input {role.name}: return the new value instead"
            )
    if not (region.result_nodes and is_plain(capture.output_spec)):
        raise CaptureError("the block returns no tensor, or an object other than a tuple or list")
    boundary = [*inputs(graphs.joint.graph).values(), *region.result_nodes.values()]
    inside = [value for half in region.halves.values() for value in _results(half)]
    only_tensors = all(isinstance(node.meta["val"], Tensor) for node in boundary)
    if not (only_tensors and all(map(_crosses, inside))):
        raise CaptureError(
            "the block takes or returns numbers that depend on data, such as results of .item(): "
            "pass them as tensors"
        )
    if _are_copied(list(region.result_nodes.values())):
        raise CaptureError("the block returns a view of an input or another result")
    # A call is recognised by the first tensor that it returns.
    tensors = {**region.result_nodes, **capture.returned_inputs}
    if next(path for path in capture.outputs if path in tensors) in capture.returned_inputs:
        raise CaptureError("the block returns an input before the tensors that it computes")


def _are_copied(values: list[fx.Node]) -> bool:
    """Whether a result of a block is a copy that tracing made, because the result shares memory
    with an input or another result. The surrounding graph would not know of the shared memory.
    """
    sources = [
        storage_root(value.args[0])  # type: ignore[arg-type]
        for value in values
        if value.target is torch.ops.aten.clone.default
    ]
    return len({*sources}) < len(sources) or any(source.op == "placeholder" for source in sources)


def _results(module: fx.GraphModule) -> list[fx.Node]:
    return [value for _, value in outputs(module.graph) if isinstance(value, fx.Node)]


def _crosses(node: fx.Node) -> bool:
    """Whether a value may cross from F to I or from I to W: a tensor, or a size of inputs."""
    value = node.meta["val"]
    size = isinstance(value, torch.SymInt) and not free_unbacked_symbols(value)
    return size or isinstance(value, Tensor)


def bind(session: RegionSession[BlockRegion], exported: fx.GraphModule) -> list[RegionCall]:
    """Make the captured graph call the regions of its blocks, and return the calls.

    Blocks that would sum a gradient in another order than autograd are refused, and called
    nevertheless: the joint graph's trace then finds all other blocks to refuse as well, and its
    result is dropped. Each round of refusals costs another trace of the model.

    Raises:
        RegionRefusedError: a block is called in the body of a higher-order operator.
    """
    calls: list[RegionCall] = []
    for node, name, block, region, guards in session.called_blocks(exported):
        refuse = partial(session.record_refusal, name)
        _refuse_sums(region, refuse, node.args, node.kwargs)
        detach = partial(session.detach, name)
        call = RegionCall(len(calls), region, block, name, guards, refuse, detach)
        with exported.graph.inserting_before(node):
            anchor = exported.graph.create_node("get_attr", ANCHOR)
        node.target = call
        node.args, node.kwargs = (anchor, tuple(node.args), dict(node.kwargs)), {}
        calls.append(call)
    return calls


def _refuse_sums(
    region: BlockRegion, refuse: Callable[[str], None], args: Any, kwargs: Any
) -> None:
    """Refuse a block that would sum a gradient in another order than autograd."""
    if not region.sum_as_autograd(tree_flatten((args, dict(kwargs)))[0]):
        refuse("it would sum the gradient of an input in another order than autograd")


def rebind(session: RegionSession[BlockRegion], exported: fx.GraphModule) -> list[RegionCall]:
    """Bind blocks again of which some results turned out to get no gradient, and return all calls.
    Return an empty list if there is no such block, or if Dynamo must trace the model again: a block
    is refused, or sizes are symbols of Dynamo's trace.
    """
    if not session.has_detached or session.is_outdated:
        return []
    nodes = [node for node in exported.graph.nodes if isinstance(node.target, RegionCall)]
    calls: list[Any] = [node.target for node in nodes]
    session.has_detached = False
    session.is_outdated = any(call.region.capture.sizes for call in calls)
    if session.is_outdated:
        return []
    for node, call in zip(nodes, calls, strict=True):
        region, guards = session.match_detached(call.name, call.region)
        _refuse_sums(region, call.refuse, *node.args[1:])
        node.target = dataclasses.replace(call, region=region, guards=guards)
    return [node.target for node in nodes]


@contextlib.contextmanager
def without_blocks(
    session: RegionSession[BlockRegion], exported: fx.GraphModule, calls: Sequence[RegionCall]
) -> Iterator[None]:
    """Context in which Dynamo's graph ``exported`` lacks the submodules of the called blocks,
    and has the anchor: a parameter that stands for the parameters of all blocks, so that
    autograd records each call. At its end the blocks are back, because the graph shares its
    submodules with the model.
    """
    anchor = nn.Parameter(new_anchor(), any(call.region.trained for call in calls))
    exported._parameters = {**exported._parameters, ANCHOR: anchor}
    places = []
    for name in {call.name for call in calls}:
        parent, _, key = name.rpartition(".")
        # Nested submodules of the model are the very ones of the graph; top-level ones have two
        # owners.
        owners = [session.model.get_submodule(parent)] if parent else [session.model, exported]
        places += [(owner._modules, key, session.blocks[name]) for owner in owners]
    try:
        for modules, key, _ in places:
            modules[key] = nn.Module()
        yield
    finally:
        for modules, key, block in places:
            modules[key] = block
