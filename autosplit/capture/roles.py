"""Roles on a joint graph, from the descriptors with which AOTAutograd labels it.

Before these: AOTAutograd's notes on nodes as the origins that passes read; and how DTensors lie
over ranks. AOTAutograd traces their local tensors: descriptors of their inputs and outputs are
wrapped in one that names the attribute of the DTensor.
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

from autosplit.capture.module_paths import frames
from autosplit.errors import CaptureError, PythonStateError
from autosplit.passes import Kind, Role
from autosplit.passes.analysis.operators import writes_in_backward
from autosplit.passes.graph import ORIGIN, STATE, Origin, inputs, placeholders, source_line
from autosplit.torch_internals.dtensor import Sharding, is_dtensor

_TAG = "partitioner_tag"
_FORWARD = {"is_forward", "must_be_in_forward"}


def _written_in_backward(name: str, value: fx.Node) -> CaptureError:
    """The error for what a backward writes into, which no graph of ours holds."""
    return CaptureError(
        f"the backward writes into {name!r} (from {source_line(value)}), and graphs of backwards "
        "do not write. Return the value as a gradient, or have the training loop write it; if it "
        "is known in the forward, write it there. A model that is split without fullgraph=True "
        "and not in stages runs such a function by ordinary autograd"
    )


def is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get(_TAG) not in _FORWARD


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_HALVES = {"is_forward": False, "is_backward": True}


def note_origins(graph: fx.Graph) -> None:
    """Say of every node where it comes from, in place of what was said before."""
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
_OF_MESHES = "device_mesh."  # how operators that make one mesh of another are called


def whole(desc: Any) -> Any:
    """The descriptor of the DTensor whose local tensor one is about; others as they are."""
    local = isinstance(desc, _OF_SUBCLASS) and desc.attr == _LOCAL
    return desc.base if local else desc


def drop_meshes(graph: fx.Graph) -> None:
    """Remove the meshes of DTensors from a joint graph, which takes and returns them besides their
    local tensors, and computes nothing with them but meshes: one that it returns and did not take
    as the same object it makes of one that it took.
    """
    output = graph.output_node()
    descs, values = output.meta["desc"], output.args[0]
    kept = [at for at, desc in enumerate(descs) if not is_mesh(desc)]
    if len(kept) < len(descs):
        output.args = ([values[at] for at in kept],)  # type: ignore[index]
        output.meta["desc"] = [descs[at] for at in kept]
    for node in reversed([*graph.nodes]):
        makes_mesh = str(node.target).startswith(_OF_MESHES)  # an overload, or a packet of them
        is_mesh_input = node.op == "placeholder" and is_mesh(node.meta["desc"])
        if (makes_mesh or is_mesh_input) and not node.users:
            graph.erase_node(node)


def is_mesh(desc: Any) -> bool:
    """Whether a descriptor is about the mesh of a DTensor."""
    return isinstance(desc, _OF_SUBCLASS) and desc.attr == _MESH


def shardings(joint: Any, module: nn.Module, inputs: Sequence[Any]) -> dict[Any, Sharding]:
    """Descriptor of what is a DTensor -> how it lies.

    Args:
        joint: what AOTAutograd exported, whose graph still has all of its inputs and outputs.
        module: the module, whose parameters and buffers those of the graph are.
        inputs: leaves of what it was captured for.
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
    """Each DTensor's descriptor, by the place of its first part among flattened values."""
    for meta in metas:
        if isinstance(meta, SubclassCreationMeta) and is_dtensor(meta.original_subclass):
            yield whole(descs[meta.flat_tensor_start_idx]), Sharding.of(meta.original_subclass)


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the name it has in ``named_parameters()``."""
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False)]
    named += [*module.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


class DescriptorRoles(Protocol):
    """AOTAutograd's descriptors of inputs and outputs -> roles."""

    def primal(self, desc: Any) -> Role | None:
        """Role of an input of the forward; None for one that cannot be split."""

    def result(self, desc: Any) -> str | None:
        """Name of an output that is no mutated input; None for one that cannot be split."""

    def input(self, desc: Any) -> Role:
        """Role of an input of the joint graph.

        Raises:
            CaptureError: it is of a kind that cannot be split.
        """
        desc = whole(desc)
        if isinstance(desc, d.TangentAOTInput):
            return Role(Kind.TANGENT, self.output(desc.output).name)
        role = self.primal(desc)
        if role is None:
            raise CaptureError(
                f"the traced graph takes {desc!r}, which autosplit does not know how to split "
                "(inputs of tensor subclasses other than DTensor, and effect tokens, are such)"
            )
        return role

    def output(self, desc: Any) -> Role:
        """Role of an output of the joint graph.

        Raises:
            CaptureError: it is of a kind that cannot be split.
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
            raise CaptureError(f"the traced graph returns {desc!r}, which autosplit cannot split")
        return Role(Kind.OUTPUT, name)

    def of(self, desc: Any) -> Role:
        """Role of an input or an output.

        Raises:
            CaptureError: as ``input`` and ``output``.
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


def with_roles(module: fx.GraphModule, names: DescriptorRoles) -> fx.GraphModule:
    """Label the graph; drop unused inputs and gradients that do not exist; give a
    tied parameter one input and one gradient.
    """
    graph = module.graph
    for node in filter(writes_in_backward, graph.nodes):
        target, value = node.args[:2]
        raise _written_in_backward(names.input(target.meta["desc"]).name, value)
    drop_meshes(graph)
    seen: dict[Role, fx.Node] = {}
    for node in placeholders(graph):
        # An output that needs a gradient takes one, though all gradients may be the same whatever
        # it is (those of ``angle``, of ``sgn``).
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
    if not any(free_unbacked_symbols(size) for size in shape):
        return
    sizes = [size if type(size) is int else size.node.maybe_as_int() for size in shape]
    if None in sizes:
        raise CaptureError(
            f"the size of {role.name}, {list(tensor.shape)}, depends on the data; a captured "
            "graph needs sizes that follow from the inputs' sizes"
        )
    value.meta["val"] = tensor.new_empty_strided(sizes, tensor.stride())


def _refuse_unshaped(name: str, graph: fx.Graph) -> None:
    """Refuse a call that fills a buffer without elements, as the first of an observer does: what
    shape that gets, tracing does not know.

    Raises:
        PythonStateError: it does.
    """
    buffer = inputs(graph, Kind.BUFFER).get(Role(Kind.BUFFER, name))
    if buffer is not None and not buffer.meta["val"].numel():
        raise PythonStateError(
            f"the forward fills buffer {name!r}, which has no elements; call the module once "
            "before it is split"
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
            raise _written_in_backward(role.name, value)
        if role.kind is Kind.UPDATE:
            _refuse_unshaped(role.name, graph)
        _make_sizes_static(role, value)
        if role in pairs:  # a tied parameter: one accumulator, so one gradient
            with graph.inserting_before(output):
                total = graph.call_function(torch.ops.aten.add.Tensor, (pairs[role], value))
            total.meta = dict(value.meta)
            value = total
        pairs[role] = value
    output.args = (list(pairs.values()),)
    output.meta["roles"] = tuple(pairs)
