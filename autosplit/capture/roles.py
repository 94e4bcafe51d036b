"""Roles on a joint graph, from the descriptors with which AOTAutograd labels it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors as d
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autosplit.errors import CaptureError
from autosplit.passes.graph import Kind, Role, inputs, placeholders

from .backward_writes import is_backward, take_writes, written_twice
from .dtensor_roles import drop_meshes, whole
from .node_origins import note_origins


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the name it has in ``named_parameters()``."""
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False)]
    named += [*module.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


class DescriptorRoles(Protocol):
    """AOTAutograd's descriptors of inputs and outputs -> roles."""

    error: type[Exception] = CaptureError

    def primal(self, desc: Any) -> Role | None:
        """Role of an input of the forward; None for one that cannot be split."""

    def result(self, desc: Any) -> str | None:
        """Name of an output that is no mutated input; None for one that cannot be split."""

    def tangent(self, desc: Any) -> str:
        """Name of the gradient of an output."""

    def input(self, desc: Any) -> Role:
        """Role of an input of the joint graph.

        Raises:
            Exception: of type ``error``: it is of a kind that cannot be split.
        """
        desc = whole(desc)
        if isinstance(desc, d.TangentAOTInput):
            return Role(Kind.TANGENT, self.tangent(desc.output))
        role = self.primal(desc)
        if role is None:
            raise self.error(
                f"the traced graph takes {desc!r}, which autosplit does not know how to split "
                "(tensor subclasses other than DTensor, and effect tokens, are such inputs)"
            )
        return role

    def output(self, desc: Any) -> Role:
        """Role of an output of the joint graph.

        Raises:
            Exception: of type ``error``: it is of a kind that cannot be split.
        """
        desc = whole(desc)
        match desc:
            case d.InputMutationAOTOutput():
                return Role(Kind.UPDATE, self.input(desc.mutated_input).name)
            case d.GradAOTOutput():
                source = self.input(desc.grad_of)
                kind = Kind.PARAMETER_GRAD if source.kind is Kind.PARAMETER else Kind.INPUT_GRAD
                return Role(kind, source.name)
        name = self.result(desc)
        if name is None:
            raise self.error(f"the traced graph returns {desc!r}, which autosplit cannot split")
        return Role(Kind.OUTPUT, name)

    def of(self, desc: Any) -> Role:
        """Role of an input or an output.

        Raises:
            Exception: as ``input`` and ``output``.
        """
        return self.input(desc) if isinstance(desc, d.AOTInput) else self.output(desc)


@dataclasses.dataclass(frozen=True)
class ModuleRoles(DescriptorRoles):
    """Roles in the joint graph of an exported module.

    Attributes:
        state: name of a parameter or buffer -> its canonical name.
        inputs: paths of the input leaves.
        outputs: paths of the result leaves.
    """

    state: dict[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def primal(self, desc: Any) -> Role | None:
        match desc:
            case d.ParamAOTInput():
                return Role(Kind.PARAMETER, self.state[desc.target])
            case d.BufferAOTInput():
                return Role(Kind.BUFFER, self.state[desc.target])
            case d.PlainAOTInput():
                return Role(Kind.INPUT, self.inputs[desc.idx])
        return None

    def result(self, desc: Any) -> str | None:
        return self.outputs[desc.idx] if isinstance(desc, d.PlainAOTOutput) else None

    def tangent(self, desc: Any) -> str:
        return self.output(desc).name

    def output(self, desc: Any) -> Role:
        """As ``DescriptorRoles.output``.

        Raises:
            CaptureError: also for a parameter that is written in place, or a buffer that requires
                a gradient.
        """
        match whole(desc):
            case d.InputMutationAOTOutput() as mutation:
                source = self.input(mutation.mutated_input)
                if source.kind is Kind.PARAMETER:
                    raise CaptureError(
                        f"forward writes into parameter {source.name!r} in place; "
                        "make it a buffer, or update it outside forward"
                    )
            case d.GradAOTOutput() as gradient:
                source = self.input(gradient.grad_of)
                if source.kind is Kind.BUFFER:
                    raise CaptureError(
                        f"buffer {source.name!r} requires a gradient; make it a parameter"
                    )
        return super().output(desc)


def with_roles(module: fx.GraphModule, names: ModuleRoles) -> fx.GraphModule:
    """Label the graph; drop unused inputs and gradients that do not exist; give a
    tied parameter one input and one gradient.
    """
    graph = module.graph
    drop_meshes(graph)
    writes = take_writes(graph, lambda node: names.input(node.meta["desc"]), CaptureError)
    seen: dict[Role, fx.Node] = {}
    for node in placeholders(graph):
        # An output that needs a gradient takes one, though all gradients may be the same whatever
        # it is (those of ``angle``, of ``sgn``).
        if not node.users and not isinstance(whole(node.meta["desc"]), d.TangentAOTInput):
            graph.erase_node(node)
            continue
        role = node.meta.get("role") or names.input(node.meta["desc"])
        if role in seen:
            node.replace_all_uses_with(seen[role])
            graph.erase_node(node)
            continue
        seen[role] = node
        node.meta["role"] = role
        _make_sizes_static(role, node)
        _rename(node, role)
    _label_outputs(graph, names, writes)
    note_origins(graph)
    module.recompile()
    return module


def _rename(node: fx.Node, role: Role) -> None:
    """Name the placeholder as the user does: ``primals_3`` says nothing in a dump."""
    name = re.sub(r"\W+", "_", role.name).strip("_")
    prefix = "grad_" if role.kind is Kind.TANGENT else ""
    node.name = node.target = node.graph._graph_namespace.create_name(prefix + name, None)


def _make_sizes_static(role: Role, value: Any) -> None:
    """Turn sizes of an input or output that depend on data into integers: those of a view whose
    offset depends on data are symbols, though the symbols may cancel out.

    Raises:
        CaptureError: a size depends on the data.
    """
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, torch.Tensor) or all(type(size) is int for size in tensor.shape):
        return
    shape: tuple[Any, ...] = tensor.shape
    if not any(free_unbacked_symbols(each) for each in shape):
        return
    sizes = [each if type(each) is int else each.node.maybe_as_int() for each in shape]
    if None in sizes:
        raise CaptureError(
            f"the size of {role.name}, {list(tensor.shape)}, depends on the data; a captured "
            "graph needs sizes that follow from the inputs' sizes"
        )
    value.meta["val"] = tensor.new_empty_strided(sizes, tensor.stride())


def _label_outputs(graph: fx.Graph, names: ModuleRoles, writes: list[tuple[Role, fx.Node]]) -> None:
    output = graph.output_node()
    pairs: dict[Role, Any] = {}
    has_backward = bool(inputs(graph, Kind.TANGENT))
    for desc, value in zip(output.meta["desc"], output.args[0], strict=True):  # type: ignore[arg-type]
        if desc is None or (value is None and isinstance(whole(desc), d.GradAOTOutput)):
            continue
        role = names.output(desc)
        if role.kind is Kind.UPDATE and has_backward and is_backward(value):
            raise written_twice(role.name, value, CaptureError)
        _make_sizes_static(role, value)
        if role in pairs:  # a tied parameter: one accumulator, so one gradient
            with graph.inserting_before(output):
                total = graph.call_function(torch.ops.aten.add.Tensor, (pairs[role], value))
            total.meta = dict(value.meta)
            value = total
        pairs[role] = value
    pairs.update(writes)
    output.args = (list(pairs.values()),)
    output.meta["roles"] = tuple(pairs)
