"""Capture of a module's forward graph, which the planner cuts into stages.

The capture names the graph's inputs as user inputs, state and constants, and records each node's
effects (writes, random numbers, cost).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from autosplit.capture.attribute_values import AttributeValue, values_of
from autosplit.capture.diagnosis import user_errors
from autosplit.capture.export import export
from autosplit.capture.forward_blocks import ForwardRegion, export_around_blocks
from autosplit.capture.forward_sizes import ForwardSizes
from autosplit.capture.guards import unobserved
from autosplit.capture.input_sizes import Inputs, fake_example, input_tensors, is_open
from autosplit.capture.node_effects import Effect, examine
from autosplit.capture.region_session import capture_around_blocks
from autosplit.capture.roles import canonical_names
from autosplit.capture.workarounds.operators import refuse_traced_otherwise
from autosplit.errors import CaptureError
from autosplit.torch_internals.distributed import refuse_sharded
from autosplit.torch_internals.dynamo import traced_value
from autosplit.torch_internals.pytree import TreeSpec, hold, tree_flatten


@dataclass(frozen=True)
class CapturedForward:
    """The forward of a module as one graph, without a backward.

    Attributes:
        module: Dynamo's graph: torch's own functions, as the user's code calls them.
        inputs: placeholder -> position among the tensors of ``(args, kwargs)``.
        state: node -> first name of the parameter or buffer that it reads.
        parameters: first names of all parameters.
        constants: node -> the tensor that it reads.
        effects: effect of every node.
        leaves: leaves of the result: nodes, or values that are not tensors.
        spec: structure of the result.
        sizes: the symbolic sizes of the graph; None if no size was left open.
        aux_losses: name of an attribute -> the nodes of the auxiliary losses that the forward
            leaves in this attribute of its modules.
    """

    module: fx.GraphModule
    inputs: dict[fx.Node, int]
    state: dict[fx.Node, str]
    parameters: frozenset[str]
    constants: dict[fx.Node, Tensor]
    effects: dict[fx.Node, Effect]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    sizes: ForwardSizes | None = None
    aux_losses: Mapping[str, Sequence[fx.Node]] = field(default_factory=dict)

    @cached_property
    def size_nodes(self) -> frozenset[fx.Node]:
        """The nodes whose values are numbers that follow from the sizes of the inputs."""
        if self.sizes is None:
            return frozenset()
        return frozenset(
            n for n, effect in self.effects.items() if self.sizes.is_size(effect.value)
        )

    def concrete(self, value: Tensor) -> Tensor | None:
        """A tensor with the sizes and strides of a value, as numbers; None if they depend on data.
        Open sizes have the values of the capture's inputs.
        """
        if not any(isinstance(size, torch.SymInt) for size in value.shape):
            return value
        return None if self.sizes is None else self.sizes.concrete(value)


def capture_forward(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    aux_losses: Collection[str] = (),
) -> CapturedForward:
    """Trace ``module(*args, **kwargs)`` without running it on real data. All inputs must be
    different tensors. Sizes that ``leave_open`` has marked may become symbols. The forward may set
    computed tensors as attributes of its modules only if their names are in ``aux_losses``.

    Raises:
        CaptureError: the module cannot be traced into one graph; names the user's line. Or an
            auxiliary loss is no scalar.
        ShardedError: FSDP manages the module or a part of it.
    """
    refuse_sharded(module)
    with user_errors(module), unobserved(), torch.enable_grad():
        exported, tensors = _exported(module, args, kwargs, aux_losses)
        refuse_traced_otherwise(exported)
        codegen: Any = exported.graph._codegen
        values = (*args, *kwargs.values())
        sizes = _open_sizes(exported, (args, kwargs), tensors) if is_open(args, kwargs) else None
        effects = examine(exported, sizes)
        for node in exported.graph.find_nodes(op="get_attr"):
            if isinstance(effects[node].value, Tensor):
                tensors[node] = effects[node].value
        outputs: Any = exported.graph.output_node().args[0]
        results = [effects[n].value if isinstance(n, fx.Node) else n for n in outputs]
        tree = codegen.dynamo_bytecode_unflatten(results, values)
        labels = values_of(exported)
        tree, *losses = tree if labels else (tree,)
        leaves, spec = tree_flatten(hold(tree))
        result_nodes = {id(value): node for value, node in zip(results, outputs, strict=True)}
        returned = [x for x in leaves if isinstance(x, Tensor) and id(x) not in result_nodes]
        positions = _input_positions((args, kwargs))[1]
        for node in _add_returned(module, exported, positions, returned, tensors):
            effects[node] = Effect(node.meta["val"])
            if sizes is not None and id(tensors[node]) in positions:
                sizes.add_input(positions[id(tensors[node])], node.meta["val"])
    if sizes is not None and any(map(sizes.is_size, leaves)):
        raise CaptureError(
            f"{type(module).__name__} returns a number that depends on the sizes of its inputs, "
            "which vary: return tensors, and read sizes from them"
        )
    nodes = {id(tensor): node for node, tensor in tensors.items()} | result_nodes
    result_leaves = tuple(nodes[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    parameters = frozenset(name for name, _ in module.named_parameters())
    loss_nodes = _aux_losses(labels, losses, result_nodes)
    forward = CapturedForward(
        exported, {}, {}, parameters, {}, effects, result_leaves, spec, sizes, loss_nodes
    )
    _name(forward, module, (args, kwargs), tensors)
    return forward


def _aux_losses(
    labels: Sequence[AttributeValue], losses: Sequence[Tensor], nodes: Mapping[int, fx.Node]
) -> dict[str, list[fx.Node]]:
    """The nodes of auxiliary losses, by the name of the attribute.

    Raises:
        CaptureError: a loss is no scalar.
    """
    by_name: dict[str, list[fx.Node]] = {}
    for label, loss in zip(labels, losses, strict=True):
        if loss.dim():
            raise CaptureError(
                f"the auxiliary loss {label.name} has shape {list(loss.shape)}, and must be a "
                "scalar: reduce it, as by .mean(), before the forward sets it"
            )
        by_name.setdefault(label.attribute, []).append(nodes[id(loss)])
    return by_name


def _exported(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    aux_losses: Collection[str],
) -> tuple[fx.GraphModule, Inputs]:
    """Dynamo's graph of a module, and its inputs."""
    around_blocks = None
    if not (aux_losses or is_open(args, kwargs)):
        capture = partial(export_around_blocks, module, args, kwargs)
        around_blocks = capture_around_blocks(module, ForwardRegion.of_block, capture)
    if around_blocks is not None:
        return around_blocks
    exported, _ = export(module, args, kwargs, values=aux_losses)
    return exported, input_tensors(exported, args, kwargs)


def _input_positions(inputs: Any) -> tuple[list[Tensor], dict[int, int]]:
    """The input tensors, and their positions by ``id``."""
    tensors = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    return tensors, {id(tensor): position for position, tensor in enumerate(tensors)}


def _open_sizes(exported: fx.GraphModule, inputs: Any, tensors: dict[fx.Node, Any]) -> ForwardSizes:
    """The symbolic sizes of a graph that was exported with these inputs."""
    examples, positions = _input_positions(inputs)
    traced = {
        positions[id(tensor)]: traced_value(node)
        for node, tensor in tensors.items()
        if id(tensor) in positions
    }
    return ForwardSizes(exported.meta["fake_mode"].shape_env, traced, examples)


def _add_returned(
    module: nn.Module,
    exported: fx.GraphModule,
    inputs: Collection[int],
    leaves: list[Tensor],
    tensors: dict[fx.Node, Any],
) -> list[fx.Node]:
    """Add graph inputs for inputs, parameters and buffers that the model returns without reading
    them.

    Args:
        module: the model.
        exported: the graph.
        inputs: ``id`` of each input tensor.
        leaves: the tensors that the model returns and the graph does not compute.
        tensors: the graph's inputs, to which the new ones are added.

    Returns:
        the new inputs.
    """
    nodes: list[fx.Node] = []
    read = {id(tensor) for tensor in tensors.values()}
    state = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for leaf in {id(leaf): leaf for leaf in leaves if id(leaf) not in read}.values():
        if id(leaf) not in state and id(leaf) not in inputs:
            raise CaptureError(
                f"{type(module).__name__} returns a tensor of shape {list(leaf.shape)} that is "
                "neither computed nor an input, a parameter or a buffer; register it as a buffer"
            )
        with exported.graph.inserting_before(next(iter(exported.graph.nodes))):
            node = exported.graph.placeholder(f"returned_{len(tensors)}")
        tensors[node] = leaf
        node.meta["val"] = fake_example(exported.meta["fake_mode"], leaf)
        nodes.append(node)
    return nodes


def _name(
    forward: CapturedForward, module: nn.Module, inputs: Any, tensors: dict[fx.Node, Any]
) -> None:
    names = canonical_names(module)
    named = [*module.named_parameters(remove_duplicate=False)]
    named += [*module.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
    state = {id(tensor): names[name] for name, tensor in named}
    _, positions = _input_positions(inputs)
    for node, tensor in tensors.items():
        if id(tensor) in state:
            forward.state[node] = state[id(tensor)]
        elif id(tensor) in positions:
            forward.inputs[node] = positions[id(tensor)]
        else:
            forward.constants[node] = tensor
