"""Capture of a module's forward graph, with its inputs as user inputs, state and constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autosplit.capture.workarounds.operators import refuse_traced_otherwise
from autosplit.errors import CaptureError
from autosplit.torch_internals.distributed import refuse_sharded
from autosplit.torch_internals.pytree import TreeSpec, hold, tree_flatten

from .diagnosis import user_errors
from .export import export
from .guards import unobserved
from .node_effects import Effect, examine
from .roles import canonical_names


@dataclass(frozen=True)
class CapturedForward:
    """A captured forward.

    Attributes:
        module: Dynamo's graph: torch's own functions, as the user's code calls them.
        inputs: placeholder -> position among the tensors of ``(args, kwargs)``.
        state: node -> the first name of the parameter or buffer that it stands for.
        parameters: names of all parameters, the first of each.
        constants: node -> the tensor that it stands for.
        effects: what every node does.
        leaves: of the result: nodes, or values that are no tensors.
        spec: how the leaves make up the result.
    """

    module: fx.GraphModule
    inputs: dict[fx.Node, int]
    state: dict[fx.Node, str]
    parameters: frozenset[str]
    constants: dict[fx.Node, Tensor]
    effects: dict[fx.Node, Effect]
    leaves: tuple[Any, ...]
    spec: TreeSpec


def capture_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CapturedForward:
    """Trace ``module(*args, **kwargs)`` without running it on real data. No two of the inputs
    may be one tensor.

    Raises:
        CaptureError: it cannot be traced into one graph; names the user's line.
        ShardedError: FSDP manages the module or a part of it.
    """
    refuse_sharded(module)
    with user_errors(module), unobserved(), torch.enable_grad():
        exported, _ = export(module, args, kwargs)
        refuse_traced_otherwise(exported)
        codegen: Any = exported.graph._codegen
        values = (*args, *kwargs.values())
        given = codegen.dynamo_bytecode_flatten(*values)
        effects = examine(exported)
        tensors = dict(zip(exported.graph.find_nodes(op="placeholder"), given, strict=True))
        for node in exported.graph.find_nodes(op="get_attr"):
            if isinstance(effects[node].value, Tensor):
                tensors[node] = effects[node].value
        outputs: Any = exported.graph.output_node().args[0]
        results = [effects[n].value if isinstance(n, fx.Node) else n for n in outputs]
        tree = hold(codegen.dynamo_bytecode_unflatten(results, values))
        leaves, spec = tree_flatten(tree)
        made = {id(value): node for value, node in zip(results, outputs, strict=True)}
        _add_returned(module, exported, [x for x in leaves if id(x) not in made], tensors, effects)
    nodes = {id(tensor): node for node, tensor in tensors.items()} | made
    found = tuple(nodes[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    parameters = frozenset(name for name, _ in module.named_parameters())
    forward = CapturedForward(exported, {}, {}, parameters, {}, effects, found, spec)
    _name(forward, module, (args, kwargs), tensors)
    return forward


def _add_returned(
    module: nn.Module,
    exported: fx.GraphModule,
    leaves: list[Any],
    tensors: dict[fx.Node, Any],
    effects: dict[fx.Node, Effect],
) -> None:
    """Make graph inputs of state and inputs that the model returns without reading them."""
    known = {id(tensor) for tensor in tensors.values()}
    state = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or id(leaf) in known:
            continue
        if id(leaf) not in state:
            raise CaptureError(
                f"{type(module).__name__} returns a tensor of shape {list(leaf.shape)} that it "
                "neither computes nor is given, nor has as a parameter or buffer"
            )
        with exported.graph.inserting_before(next(iter(exported.graph.nodes))):
            node = exported.graph.placeholder(f"returned_{len(tensors)}")
        known.add(id(leaf))
        tensors[node] = leaf
        effects[node] = Effect(exported.meta["fake_mode"].from_tensor(leaf))


def _name(
    found: CapturedForward, module: nn.Module, inputs: Any, tensors: dict[fx.Node, Any]
) -> None:
    names = canonical_names(module)
    every = [*module.named_parameters(remove_duplicate=False)]
    every += [*module.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
    state = {id(tensor): names[name] for name, tensor in every}
    leaves = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    positions = {id(leaf): position for position, leaf in enumerate(leaves)}
    for node, tensor in tensors.items():
        if id(tensor) in state:
            found.state[node] = state[id(tensor)]
        elif id(tensor) in positions:
            found.inputs[node] = positions[id(tensor)]
        else:
            found.constants[node] = tensor
