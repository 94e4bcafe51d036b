"""How the DTensors among what a graph takes and returns lie over ranks, by role.

AOTAutograd traces the local tensors of DTensors: descriptors of their inputs and outputs are
wrapped in one that names the attribute of the DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch._functorch._aot_autograd import descriptors as d
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta

from autosplit.passes.graph import placeholders
from autosplit.torch_internals.dtensor import Sharding, is_dtensor

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
        made = str(node.target).startswith(_OF_MESHES)  # an overload, or a packet of them
        taken = node.op == "placeholder" and is_mesh(node.meta["desc"])
        if (made or taken) and not node.users:
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
    named: list[tuple[Any, Any]] = [(d.ParamAOTInput(name), each) for name, each in state.items()]
    named += [(d.BufferAOTInput(name), each) for name, each in state.items()]
    named += [(d.PlainAOTInput(at), each) for at, each in enumerate(inputs)]
    found = {desc: Sharding.of(each) for desc, each in named if is_dtensor(each)}
    graph, meta = joint.graph_module.graph, joint._aot_state.fw_metadata
    results = graph.output_node().meta["desc"]
    found |= _described(results, meta.subclass_fw_graph_out_meta)
    tangents = [n.meta["desc"] for n in placeholders(graph) if n.meta["desc"].is_tangent()]
    found |= _described(tangents, meta.subclass_tangent_meta)
    traced = joint._aot_graph_capture.maybe_subclass_meta
    gradients = () if traced is None else traced.grad_input_metas or ()
    behind = len(results) - sum(getattr(each, "arg_count", 1) for each in gradients)
    return found | dict(_described(results[behind:], gradients))


def _described(descs: Sequence[Any], metas: Iterable[Any]) -> Mapping[Any, Sharding]:
    return dict(_pairs(descs, metas))


def _pairs(descs: Sequence[Any], metas: Iterable[Any]) -> Iterator[tuple[Any, Sharding]]:
    """Each DTensor's descriptor, by the place of its first part among flattened values."""
    for meta in metas:
        if isinstance(meta, SubclassCreationMeta) and is_dtensor(meta.original_subclass):
            yield whole(descs[meta.flat_tensor_start_idx]), Sharding.of(meta.original_subclass)
