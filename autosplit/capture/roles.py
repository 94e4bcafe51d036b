"""Roles of a joint graph's inputs and outputs, from AOTAutograd's descriptors.

``note_origins`` turns AOTAutograd's metadata of nodes into the origins that passes read.
``shardings`` reads the shardings of DTensors. AOTAutograd traces the local tensors of DTensors. The
descriptor of a local tensor wraps the DTensor's descriptor, and names the attribute of the DTensor
that holds the local tensor.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors as d
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils.checkpoint import CheckpointPolicy

from autosplit.capture.backward_writes import forward_value, label_writes, refused_write
from autosplit.capture.module_paths import frames
from autosplit.errors import CaptureError, PythonStateError
from autosplit.passes import Kind, Role
from autosplit.passes.analysis.operators import writes_in_backward
from autosplit.passes.graph import ORIGIN, STATE, Origin, inputs, placeholders
from autosplit.torch_internals.dtensor import Sharding, is_dtensor

_TAG = "partitioner_tag"
_FORWARD = {"is_forward", "must_be_in_forward"}


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd tagged the node as an operation of the backward."""
    return node.op == "call_function" and node.meta.get(_TAG) not in _FORWARD


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_HALVES = {"is_forward": False, "is_backward": True}


def note_origins(graph: fx.Graph) -> None:
    """Write the origin of every node, replacing earlier origins."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta[ORIGIN] = _origin(node.meta)


def _origin(meta: dict[str, Any]) -> Origin:
    module_stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    return Origin(
        frames(module_stack),
        _HALVES.get(meta.get("partitioner_tag", "")),
        meta.get("recompute") in _RECOMPUTED,
        meta.get("ac_graph_id"),
    )


_OF_SUBCLASS = (d.SubclassGetAttrAOTInput, d.SubclassGetAttrAOTOutput)
_LOCAL, _MESH = "_local_tensor", "device_mesh"
_OF_MESHES = "device_mesh."  # prefix of operators that make one mesh from another


def whole(desc: Any) -> Any:
    """The descriptor of a DTensor, from the descriptor of its local tensor. Other descriptors are
    unchanged.
    """
    local = isinstance(desc, _OF_SUBCLASS) and desc.attr == _LOCAL
    return desc.base if local else desc


def drop_meshes(graph: fx.Graph) -> None:
    """Remove the meshes of DTensors from a joint graph.

    The graph takes and returns a mesh beside each local tensor. From meshes it computes only other
    meshes.
    """
    output = graph.output_node()
    descs, values = output.meta["desc"], output.args[0]
    kept = [at for at, desc in enumerate(descs) if not is_mesh(desc)]
    if len(kept) < len(descs):
        output.args = ([values[at] for at in kept],)  # type: ignore[index]
        output.meta["desc"] = [descs[at] for at in kept]
    for node in reversed([*graph.nodes]):
        makes_mesh = str(node.target).startswith(_OF_MESHES)  # an overload or an overload packet
        is_mesh_input = node.op == "placeholder" and is_mesh(node.meta["desc"])
        if (makes_mesh or is_mesh_input) and not node.users:
            graph.erase_node(node)


def is_mesh(desc: Any) -> bool:
    """Whether a descriptor belongs to the mesh of a DTensor."""
    return isinstance(desc, _OF_SUBCLASS) and desc.attr == _MESH


def shardings(joint: Any, module: nn.Module, inputs: Sequence[Any]) -> dict[Any, Sharding]:
    """Map the descriptor of each input and output that is a DTensor to its sharding.

    Args:
        joint: AOTAutograd's export, before inputs or outputs of its graph are dropped.
        module: the module with the graph's parameters and buffers.
        inputs: leaves of the example inputs.
    """
    state = dict(module.named_parameters(remove_duplicate=False))
    state |= dict(module.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    named: list[tuple[Any, Any]] = [
        (d.ParamAOTInput(name), tensor) for name, tensor in state.items()
    ]
    named += [(d.BufferAOTInput(name), tensor) for name, tensor in state.items()]
    named += [(d.PlainAOTInput(at), value) for at, value in enumerate(inputs)]
    sharding_by_desc = {desc: Sharding.of(tensor) for desc, tensor in named if is_dtensor(tensor)}
    graph, meta = joint.graph_module.graph, joint._aot_state.fw_metadata
    results = graph.output_node().meta["desc"]
    sharding_by_desc |= _described(results, meta.subclass_fw_graph_out_meta)
    tangents = [n.meta["desc"] for n in placeholders(graph) if n.meta["desc"].is_tangent()]
    sharding_by_desc |= _described(tangents, meta.subclass_tangent_meta)
    traced = joint._aot_graph_capture.maybe_subclass_meta
    gradients = () if traced is None else traced.grad_input_metas or ()
    first_gradient = len(results) - sum(getattr(gradient, "arg_count", 1) for gradient in gradients)
    return sharding_by_desc | dict(_described(results[first_gradient:], gradients))


def _described(descs: Sequence[Any], metas: Iterable[Any]) -> Mapping[Any, Sharding]:
    return dict(_pairs(descs, metas))


def _pairs(descs: Sequence[Any], metas: Iterable[Any]) -> Iterator[tuple[Any, Sharding]]:
    """Yield (descriptor, sharding) of each DTensor, once."""
    for meta in metas:
        if isinstance(meta, SubclassCreationMeta) and is_dtensor(meta.original_subclass):
            yield whole(descs[meta.flat_tensor_start_idx]), Sharding.of(meta.original_subclass)


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to its first name, the one in
    ``named_parameters()``.
    """
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False)]
    named += [*module.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


class DescriptorRoles(Protocol):
    """Maps AOTAutograd's descriptors of inputs and outputs to roles."""

    def primal(self, desc: Any) -> Role | None:
        """Role of the forward's input that AOTAutograd describes as ``desc``; None if it is
        unsupported.
        """

    def result(self, desc: Any) -> str | None:
        """Name of the output, other than a mutated input, that AOTAutograd describes as ``desc``;
        None if it is unsupported.
        """

    def input(self, desc: Any) -> Role:
        """Role of the joint graph's input that AOTAutograd describes as ``desc``.

        Raises:
            CaptureError: autosplit supports no input or output of this kind.
        """
        desc = whole(desc)
        if isinstance(desc, d.TangentAOTInput):
            return Role(Kind.TANGENT, self.output(desc.output).name)
        role = self.primal(desc)
        if role is None:
            raise CaptureError(
                f"the traced graph takes {desc!r}, which autosplit cannot split. Supported inputs "
                "are plain tensors and DTensors, not other tensor subclasses or effect tokens"
            )
        return role

    def output(self, desc: Any) -> Role:
        """Role of the joint graph's output that AOTAutograd describes as ``desc``.

        Raises:
            CaptureError: autosplit supports no input or output of this kind.
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
            raise CaptureError(
                f"the traced graph returns {desc!r}, which autosplit cannot split. Supported "
                "outputs are plain tensors and DTensors"
            )
        return Role(Kind.OUTPUT, name)

    def role_of(self, desc: Any) -> Role:
        """Role of an input or an output.

        Raises:
            CaptureError: as raised by ``input`` and ``output``.
        """
        return self.input(desc) if isinstance(desc, d.AOTInput) else self.output(desc)


@dataclasses.dataclass(frozen=True)
class ModuleRoles(DescriptorRoles):
    """Roles in the joint graph of an exported module.

    Attributes:
        state: maps every name of a parameter or buffer to its first name.
        inputs: paths of the input leaves.
        outputs: paths of the result leaves.
    """

    state: dict[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def primal(self, desc: Any) -> Role | None:
        """Role of the forward's input that AOTAutograd describes as ``desc``; None if it is
        unsupported. Attributes of a DTensor parameter, its local tensor excepted, are buffers.
        """
        match desc:
            case d.ParamAOTInput():
                return Role(Kind.PARAMETER, self.state.get(desc.target, desc.target))
            case d.BufferAOTInput():
                return Role(Kind.BUFFER, self.state[desc.target])
            case d.PlainAOTInput():
                return Role(Kind.INPUT, self.inputs[desc.idx])
            case d.SubclassGetAttrAOTInput() if desc.attr != _LOCAL:
                base = self.primal(desc.base)
                if base is not None and base.kind in STATE:
                    return Role(Kind.BUFFER, f"{base.name}.{desc.attr}")
        return None

    def result(self, desc: Any) -> str | None:
        return self.outputs[desc.idx] if isinstance(desc, d.PlainAOTOutput) else None

    def output(self, desc: Any) -> Role:
        """Role of the joint graph's output that AOTAutograd describes as ``desc``; see
        ``DescriptorRoles.output``.

        Raises:
            CaptureError: also if the forward writes into a parameter, or a buffer requires a
                gradient.
        """
        match whole(desc):
            case d.InputMutationAOTOutput() as mutation:
                source = self.input(mutation.mutated_input)
                if source.kind is Kind.PARAMETER:
                    raise CaptureError(
                        f"the forward writes into parameter {source.name!r} in place; make it a "
                        "buffer, or update it outside of the forward"
                    )
            case d.GradAOTOutput() as gradient:
                source = self.input(gradient.grad_of)
                if source.kind is Kind.BUFFER:
                    raise CaptureError(
                        f"buffer {source.name!r} requires a gradient; make it a parameter"
                    )
        return super().output(desc)


def with_roles(module: fx.GraphModule, names: DescriptorRoles) -> fx.GraphModule:
    """Label a joint graph with roles, in place.

    Unused inputs and absent gradients are dropped. A tied parameter gets one input and one
    gradient.

    Raises:
        CaptureError: the backward writes into a tensor that is no buffer, a size depends on data,
            or an input or output is not supported.
    """
    graph = module.graph
    writes = _take_writes(graph, names)
    drop_meshes(graph)
    seen: dict[Role, fx.Node] = {}
    for node in placeholders(graph):
        # Unused tangents stay: an output that requires a gradient takes one, even if no input's
        # gradient depends on it (``sgn``, for example).
        if not node.users and not isinstance(whole(node.meta["desc"]), d.TangentAOTInput):
            graph.erase_node(node)
            continue
        role = names.input(node.meta["desc"])
        if role in seen:
            node.replace_all_uses_with(seen[role])
            graph.erase_node(node)
            continue
        seen[role] = node
        node.meta["role"] = role
        _make_sizes_static(role, node)
        _rename(node, role)
    _label_outputs(graph, names)
    label_writes(graph, writes, {*filter(is_backward, graph.nodes)})
    note_origins(graph)
    module.recompile()
    return module


def _take_writes(graph: fx.Graph, names: DescriptorRoles) -> list[tuple[Role, Any]]:
    """Remove the writes of the backward from a joint graph; return (role of the target, new value)
    of each.
    """
    writes = []
    for node in [*filter(writes_in_backward, graph.nodes)]:
        target, value = node.args[:2]
        writes.append((names.input(target.meta["desc"]), value))
        graph.erase_node(node)
    output = graph.output_node()
    values, backward = [*output.args[0]], {*filter(is_backward, graph.nodes)}  # type: ignore[misc]
    has_backward = any(whole(n.meta["desc"]).is_tangent() for n in placeholders(graph))
    for at, desc in enumerate(output.meta["desc"]):
        if isinstance(whole(desc), d.InputMutationAOTOutput) and has_backward:
            value = values[at]
            if value in backward and (left := forward_value(value, backward)) is not None:
                writes.append((names.input(whole(desc).mutated_input), value))
                values[at] = left
    output.args = (values,)
    return writes


def _rename(node: fx.Node, role: Role) -> None:
    """Name the placeholder by its role, because ``primals_3`` says nothing in a dump."""
    name = re.sub(r"\W+", "_", role.name).strip("_")
    prefix = "grad_" if role.kind is Kind.TANGENT else ""
    node.name = node.target = node.graph._graph_namespace.create_name(prefix + name, None)


def _make_sizes_static(role: Role, value: Any) -> None:
    """Turn symbolic sizes of an input or output into integers if their symbols cancel out, as in a
    view whose offset depends on data.

    Raises:
        CaptureError: a size depends on the data.
    """
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, torch.Tensor) or all(type(size) is int for size in tensor.shape):
        return
    shape: tuple[Any, ...] = tensor.shape
    if not any(free_unbacked_symbols(size) for size in shape):
        return
    sizes = [size if type(size) is int else size.node.maybe_as_int() for size in shape]
    if None in sizes:
        raise CaptureError(
            f"the shape of {role.name}, {list(tensor.shape)}, depends on the data; a captured "
            "graph needs shapes that follow from the inputs' shapes"
        )
    value.meta["val"] = tensor.new_empty_strided(sizes, tensor.stride())


def _refuse_unshaped(name: str, graph: fx.Graph) -> None:
    """Refuse a call that fills an empty buffer, as the first call of an observer does: tracing does
    not know the shape that the buffer gets.

    Raises:
        PythonStateError: the buffer has no elements.
    """
    buffer = inputs(graph, Kind.BUFFER).get(Role(Kind.BUFFER, name))
    if buffer is not None and not buffer.meta["val"].numel():
        raise PythonStateError(
            f"the forward fills buffer {name!r}, which has no elements yet; call the module once "
            "before you split it"
        )


def _label_outputs(graph: fx.Graph, names: DescriptorRoles) -> None:
    output = graph.output_node()
    pairs: dict[Role, Any] = {}
    has_backward = bool(inputs(graph, Kind.TANGENT))
    for desc, value in zip(output.meta["desc"], output.args[0], strict=True):  # type: ignore[arg-type]
        if desc is None or (value is None and isinstance(whole(desc), d.GradAOTOutput)):
            continue
        role = names.output(desc)
        if role.kind is Kind.UPDATE and has_backward and is_backward(value):
            raise refused_write(role, value)
        if role.kind is Kind.UPDATE:
            _refuse_unshaped(role.name, graph)
        _make_sizes_static(role, value)
        if role in pairs:  # a tied parameter has one accumulator and so one gradient
            with graph.inserting_before(output):
                total = graph.call_function(torch.ops.aten.add.Tensor, (pairs[role], value))
            total.meta = dict(value.meta)
            value = total
        pairs[role] = value
    output.args = (list(pairs.values()),)
    output.meta["roles"] = tuple(pairs)
