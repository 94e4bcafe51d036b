"""AOTAutograd's descriptors -> roles on the joint graph."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors as d

from autosplit.errors import CaptureError
from autosplit.passes.graph import Kind, Role, placeholders

from .node_origins import note_origins


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the name it has in ``named_parameters()``."""
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False)]
    named += [*module.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


@dataclasses.dataclass(frozen=True)
class Names:
    """Descriptor -> role."""

    state: dict[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def input(self, desc: Any) -> Role:
        match desc:
            case d.ParamAOTInput():
                return Role(Kind.PARAMETER, self.state[desc.target])
            case d.BufferAOTInput():
                return Role(Kind.BUFFER, self.state[desc.target])
            case d.PlainAOTInput():
                return Role(Kind.INPUT, self.inputs[desc.idx])
            case d.TangentAOTInput():
                return Role(Kind.TANGENT, self.output(desc.output).name)
        raise CaptureError(
            f"the traced graph takes {desc!r}, which autosplit does not know how to split "
            "(tensor subclasses and effect tokens are such inputs)"
        )

    def output(self, desc: Any) -> Role:
        match desc:
            case d.PlainAOTOutput():
                return Role(Kind.OUTPUT, self.outputs[desc.idx])
            case d.InputMutationAOTOutput():
                source = self.input(desc.mutated_input)
                if source.kind is Kind.PARAMETER:
                    raise CaptureError(
                        f"forward writes into parameter {source.name!r} in place; "
                        "make it a buffer, or update it outside forward"
                    )
                return Role(Kind.UPDATE, source.name)
            case d.GradAOTOutput():
                source = self.input(desc.grad_of)
                if source.kind is Kind.BUFFER:
                    raise CaptureError(
                        f"buffer {source.name!r} requires a gradient; make it a parameter"
                    )
                kind = Kind.PARAMETER_GRAD if source.kind is Kind.PARAMETER else Kind.INPUT_GRAD
                return Role(kind, source.name)
        raise CaptureError(f"the traced graph returns {desc!r}, which autosplit cannot split")


def with_roles(module: fx.GraphModule, names: Names) -> fx.GraphModule:
    """Label the graph; drop inputs that nobody reads and gradients that do not exist; give a
    tied parameter one input and one gradient.
    """
    graph = module.graph
    seen: dict[Role, fx.Node] = {}
    for node in placeholders(graph):
        # An output that needs a gradient takes one, though all gradients may be the same whatever
        # it is (those of ``angle``, of ``sgn``).
        if not node.users and not isinstance(node.meta["desc"], d.TangentAOTInput):
            graph.erase_node(node)
            continue
        role = names.input(node.meta["desc"])
        if role in seen:
            node.replace_all_uses_with(seen[role])
            graph.erase_node(node)
            continue
        seen[role] = node
        node.meta["role"] = role
        _settle_size(role, node)
        _rename(node, role)
    _label_outputs(graph, names)
    note_origins(graph)
    module.recompile()
    return module


def _rename(node: fx.Node, role: Role) -> None:
    """Call the placeholder what the user calls it: ``primals_3`` says nothing in a dump."""
    name = re.sub(r"\W+", "_", role.name).strip("_")
    prefix = "grad_" if role.kind is Kind.TANGENT else ""
    node.name = node.target = node.graph._graph_namespace.create_name(prefix + name, None)


def _settle_size(role: Role, value: Any) -> None:
    """Sizes of what enters and leaves the graph as integers. Those of a view that begins where
    data say are symbols, though the symbols may cancel out.

    Raises:
        CaptureError: a size depends on the data.
    """
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, torch.Tensor) or all(type(size) is int for size in tensor.shape):
        return
    shape: tuple[Any, ...] = tensor.shape
    sizes = [each if type(each) is int else each.node.maybe_as_int() for each in shape]
    if None in sizes:
        raise CaptureError(
            f"the size of {role.name}, {list(tensor.shape)}, depends on the data; a captured "
            "graph needs sizes that follow from the inputs' sizes"
        )
    value.meta["val"] = tensor.new_empty_strided(sizes, tensor.stride())


def _label_outputs(graph: fx.Graph, names: Names) -> None:
    output = graph.output_node()
    pairs: dict[Role, Any] = {}
    for desc, value in zip(output.meta["desc"], output.args[0], strict=True):  # type: ignore[arg-type]
        if desc is None or (value is None and isinstance(desc, d.GradAOTOutput)):
            continue
        role = names.output(desc)
        _settle_size(role, value)
        if role in pairs:  # a tied parameter: one accumulator, so one gradient
            with graph.inserting_before(output):
                total = graph.call_function(torch.ops.aten.add.Tensor, (pairs[role], value))
            total.meta = dict(value.meta)
            value = total
        pairs[role] = value
    output.args = (list(pairs.values()),)
    output.meta["roles"] = tuple(pairs)
