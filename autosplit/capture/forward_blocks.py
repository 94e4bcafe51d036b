"""The forward of repeated blocks, captured once for each kind and copied into their model's graph.

Dynamo's graph of the model    embed  layer(0)       layer(1)       head
with the graph of a layer      embed  norm mm mm     norm mm mm     head
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from autosplit.capture.export import export
from autosplit.capture.input_sizes import Inputs, input_tensors
from autosplit.capture.module_paths import name_modules
from autosplit.capture.region_session import CapturedBlock, RegionSession, is_plain
from autosplit.errors import CaptureError
from autosplit.passes.graph import copy_node
from autosplit.torch_internals.dynamo import traced_value
from autosplit.torch_internals.pytree import hold, tree_flatten, tree_unflatten
from autosplit.torch_internals.traced_calls import computed, fake_empty


@dataclass(frozen=True, eq=False, repr=False)
class ForwardRegion(CapturedBlock):
    """Dynamo's graph of one kind of block for one kind of call.

    Attributes:
        graph: the graph; its nodes have the names of modules in the block.
        sources: placeholder -> position among the leaves of the inputs, or name of a parameter or
            buffer.
        result: a result of the call, with nodes for tensors.
    """

    graph: fx.Graph
    sources: Mapping[fx.Node, int | str]
    result: Any

    @classmethod
    def of_block(
        cls,
        kind: str,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        detached: frozenset[str],
    ) -> ForwardRegion:
        """Capture a block, see ``CaptureBlock``.

        Raises:
            CaptureError: the block cannot be captured separately.
        """
        exported, guards = export(block, args, kwargs)
        name_modules(exported, block)
        inputs = input_tensors(exported, args, kwargs)
        examples = enumerate(tree_flatten((args, kwargs))[0])
        named = [*block.named_parameters(), *block.named_buffers()]
        sources: dict[int, int | str] = {id(tensor): name for name, tensor in named}
        sources |= {id(leaf): position for position, leaf in examples}
        constants = any(id(value) not in sources for value in inputs.values())
        attributes = exported.graph.find_nodes(op="get_attr")
        if constants or attributes or not guards.has_only_dynamo_guards:
            raise CaptureError(
                f"{kind} reads tensors other than its inputs and state, sets attributes, or calls "
                "other graphs"
            )
        if any("unbacked_bindings" in node.meta for node in exported.graph.nodes):
            raise CaptureError(f"{kind} has tensors whose sizes depend on data")
        region_sources = {node: sources[id(value)] for node, value in inputs.items()}
        result = _result(exported, args, kwargs)
        return cls(args, kwargs, guards, exported.graph, region_sources, result)

    def fake_result(self, leaves: list[Any]) -> Any:
        """A new result of a call, of fake tensors; ``leaves`` are the call's inputs."""
        results, spec = tree_flatten(self.result)
        values = {leaf: traced_value(leaf) for leaf in results if isinstance(leaf, fx.Node)}
        trained = [value.requires_grad for value in values.values()]
        empty = computed(lambda: [*map(_empty, values.values())], trained)
        tensors = dict(zip(values, empty, strict=True))
        return tree_unflatten([tensors.get(leaf, leaf) for leaf in results], spec)


def _result(exported: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a block's call, with nodes for tensors.

    Raises:
        CaptureError: the result has other tensors than computed ones, or is an object.
    """
    codegen: Any = exported.graph._codegen
    outputs: Any = exported.graph.output_node().args[0]
    values = [traced_value(node) for node in outputs]
    tree = hold(codegen.dynamo_bytecode_unflatten(values, (*args, *kwargs.values())))
    leaves, spec = tree_flatten(tree)
    nodes = {id(value): node for value, node in zip(values, outputs, strict=True)}
    computes = all(node.op != "placeholder" for node in outputs)
    has_nodes = all(id(leaf) in nodes for leaf in leaves if isinstance(leaf, Tensor))
    if not (nodes and computes and has_nodes and is_plain(spec)):
        raise CaptureError("the block returns an input, no tensor, or other objects than tuples")
    return tree_unflatten([nodes.get(id(leaf), leaf) for leaf in leaves], spec)


def _empty(like: Tensor) -> Tensor:
    return fake_empty(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def export_around_blocks(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    session: RegionSession[ForwardRegion],
) -> tuple[fx.GraphModule, Inputs] | None:
    """Dynamo's graph of a module into which the graphs of its blocks are copied, and the graph's
    inputs; None if it has no inputs.
    """
    exported, _ = export(module, args, kwargs, regions=session)
    inputs = input_tensors(exported, args, kwargs)
    calls = session.called_blocks(exported)
    if not inputs:
        return None
    copier = _Copier(exported, inputs)
    for node, name, block, region, _ in calls:
        copier.copy(node, name, block, region)
    return exported, inputs


class _Copier:
    """Copies graphs of blocks into the graph of their model.

    Args:
        exported: the graph of the model.
        inputs: its inputs; parameters and buffers of blocks are added.
    """

    def __init__(self, exported: fx.GraphModule, inputs: Inputs) -> None:
        self._graph, self._inputs = exported.graph, inputs
        self._mode = exported.meta["fake_mode"]
        self._placeholders = {id(tensor): node for node, tensor in inputs.items()}
        self._first = next(iter(inputs))

    def copy(self, call: fx.Node, name: str, block: nn.Module, region: ForwardRegion) -> None:
        """Replace the node that calls a block by the block's operations."""
        leaves = tree_flatten((call.args, dict(call.kwargs)))[0]
        copies: dict[fx.Node, Any] = {}
        for placeholder, source in region.sources.items():
            copies[placeholder] = (
                leaves[source] if isinstance(source, int) else self._state(block, source)
            )
        stacks = _Stacks(call, name, block)
        with self._graph.inserting_before(call):
            for node in region.graph.nodes:
                if node.op not in ("placeholder", "output"):
                    copies[node] = copy_node(self._graph, node, copies)
                    copies[node].meta |= stacks.of(node)
        _replace(call, region.result, copies.__getitem__)

    def _state(self, block: nn.Module, name: str) -> fx.Node:
        """The placeholder of a parameter or buffer of a block."""
        tensor = operator.attrgetter(name)(block)
        if id(tensor) not in self._placeholders:
            with self._graph.inserting_before(self._first):
                node = self._graph.placeholder(f"block_{len(self._inputs)}")
            node.meta["val"] = self._mode.from_tensor(tensor, static_shapes=True)
            self._placeholders[id(tensor)] = node
            self._inputs[node] = tensor
        return self._placeholders[id(tensor)]


class _Stacks:
    """The user's lines and modules around the operations of a block, in the model.

    Args:
        call: the node that calls the block.
        name: the block's name in the model.
        block: the block.
    """

    def __init__(self, call: fx.Node, name: str, block: nn.Module) -> None:
        self._name, self._block = name, block
        self._trace = call.meta.get("stack_trace") or ""
        self._modules: dict[str, tuple[str, Any]] = call.meta.get("nn_module_stack") or {}
        # A later call of a module has a number.
        _, at, number = next(reversed(self._modules), "").partition("@")
        self._suffix = at + number

    def of(self, node: fx.Node) -> dict[str, Any]:
        """The metadata of the copy of a node of the block's graph."""
        if "stack_trace" not in node.meta:  # switches of grad mode and autocast have none
            return {}
        modules = dict(self._modules)
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if path:  # not the block itself
                suffix = key.partition("@")[2]
                part = id(self._block.get_submodule(path))
                name = f"{part}{self._suffix}{suffix and f'@{suffix}'}"
                modules[name] = f"{self._name}.{path}", kind
        trace = self._trace + node.meta["stack_trace"]
        return {"nn_module_stack": modules, "stack_trace": trace}


def _replace(call: fx.Node, result: Any, copy_of: Callable[[fx.Node], fx.Node]) -> None:
    """Replace the results of a block's call."""
    if isinstance(result, fx.Node):
        call.replace_all_uses_with(copy_of(result))
    else:
        for item in list(call.users):
            if item.target is not operator.getitem:
                raise CaptureError(f"{item} reads the results of a block as a whole")
            _replace(item, result[item.args[1]], copy_of)
    call.graph.erase_node(call)
