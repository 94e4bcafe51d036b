"""Split graphs in AOTAutograd's calling convention, for graphs that Dynamo found.

AOTAutograd counts: inputs and outputs of both graphs stand in the order that it chose, with
what is saved between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import descriptors as d

from autosplit.passes import Kind, PassError, Role, SplitGraphs, memory_setting, run
from autosplit.passes.analysis.aliasing import storage_root
from autosplit.passes.analysis.operators import writes_in_backward
from autosplit.passes.graph import (
    FORWARD_OUTPUT,
    PRIMAL,
    STATE,
    inputs,
    outputs,
    placeholders,
    role_of,
    set_outputs,
)

from .roles import DescriptorRoles, note_origins, take_writes

_REFUSAL = (
    "autosplit defers weight gradients, which compiled autograd would lose; call backward() "
    "outside torch._dynamo.config.compiled_autograd"
)


@dataclasses.dataclass(frozen=True)
class AotGraphs:
    """One split graph in AOTAutograd's calling convention.

    Attributes:
        graphs: what the passes made.
        forward: takes every input of the joint graph; returns its outputs, then what is saved.
        backward_input: takes what is saved, in its order but integers first, then the gradients
            of outputs; returns ``slots`` gradients (None where there is none), then what I
            defers.
        slots: one for each input of the joint graph.
        results: names of the outputs of the joint graph's forward, as tangents have them.
        parameters: index of the graph's input -> name, for parameters whose gradient W makes.
    """

    graphs: SplitGraphs
    forward: fx.GraphModule
    backward_input: fx.GraphModule
    slots: int
    results: tuple[str, ...]
    parameters: dict[int, str]


class GraphRoles(DescriptorRoles):
    """Roles in the joint graph of one graph that Dynamo found; results go by their expressions.

    Args:
        roles: of the graph's inputs, by their index.
    """

    error = PassError

    def __init__(self, roles: Sequence[Role]) -> None:
        self._roles = roles
        self._changed: dict[Any, Role] = {}

    def change(self, desc: Any, kind: Kind) -> None:
        """Give an input another kind."""
        self._changed[desc] = Role(kind, self.input(desc).name)

    def primal(self, desc: Any) -> Role | None:
        if desc in self._changed:
            return self._changed[desc]
        match desc:
            case d.PlainAOTInput():
                return self._roles[desc.idx]
            case d.ViewBaseAOTInput() | d.SyntheticBaseAOTInput():
                return Role(Kind.INPUT, desc.expr())
        return None

    def result(self, desc: Any) -> str | None:
        known = isinstance(desc, d.PlainAOTOutput | d.IntermediateBaseAOTOutput)
        return desc.expr() if known else None

    def tangent(self, desc: Any) -> str:
        return str(desc.expr())


def label(graph: fx.Graph, roles: list[Role], num_forward: int, static: set[int]) -> dict[int, str]:
    """Give every input and output its role. Returns the parameters that can be deferred."""
    output = graph.output_node()
    descs = list(zip(output.meta["desc"], output.args[0], strict=True))  # type: ignore[arg-type]
    results, gradients = descs[:num_forward], descs[num_forward:]
    with_gradient = {_grad_of(desc) for desc, value in gradients if value is not None}
    kept = _kept_whole(results)
    kept |= {node.args[0].meta["desc"] for node in graph.nodes if writes_in_backward(node)}
    known = GraphRoles(roles)
    parameters: dict[int, str] = {}
    for position, node in enumerate(placeholders(graph)):
        desc = node.meta["desc"]
        role = known.input(desc)
        if role.kind is Kind.PARAMETER and (desc in kept or desc not in with_gradient):
            known.change(desc, Kind.INPUT)
        role = known.input(desc)
        if role.kind is Kind.PARAMETER:
            parameters[desc.idx] = role.name
        elif position in static and desc not in with_gradient and role.kind is Kind.INPUT:
            known.change(desc, Kind.BUFFER)
        node.meta["role"] = known.input(desc)
    labels = [known.output(desc) for desc, _ in results]
    for position, (desc, value) in enumerate(gradients):
        # An input without a gradient has no descriptor here; only its position is known.
        absent = Role(Kind.INPUT_GRAD, f"nothing[{position}]")
        labels.append(absent if value is None else known.output(desc))
    writes = take_writes(graph, role_of, PassError)
    output.args = ([value for _, value in (*descs, *writes)],)
    output.meta["roles"] = (*labels, *(role for role, _ in writes))
    note_origins(graph)
    return parameters


def _kept_whole(results: list[tuple[Any, Any]]) -> set[Any]:
    """Inputs that the graph returns (views of), or writes into: AOTAutograd makes such outputs
    from the input itself, outside the graph, and autograd must find the input there.
    """
    mutations = [desc for desc, _ in results if isinstance(desc, d.InputMutationAOTOutput)]
    roots = [storage_root(value) for _, value in results if isinstance(value, fx.Node)]
    returned = {root.meta["desc"] for root in roots if root.op == "placeholder"}
    return returned | {desc.mutated_input for desc in mutations}


def _grad_of(desc: Any) -> Any:
    if isinstance(desc, d.GradAOTOutput):
        return desc.grad_of
    raise PassError(f"the traced backward returns {desc!r}, which autosplit cannot split")


def assemble(labelled: fx.GraphModule, num_forward: int, parameters: dict[int, str]) -> AotGraphs:
    """Split the graph and convert both halves to AOTAutograd's calling convention: tensors are
    saved before integers, those whose version AOTAutograd does not check last; the backward takes
    integers first.
    """
    joint_inputs = placeholders(labelled.graph)
    writes = outputs(labelled.graph, Kind.WRITE)
    gradients = outputs(labelled.graph)[num_forward : -len(writes) or None]
    descs = labelled.graph.output_node().meta["desc"]
    # What I computed of a parameter's gradient AOTAutograd would not take from it.
    graphs = run(labelled, memory=memory_setting("balanced", overlap="none"))
    if graphs.backward is None or graphs.backward_input is None:
        raise PassError("nothing in the graph has a gradient")
    primals = [node for node in joint_inputs if role_of(node).kind in PRIMAL]
    tangents = [node for node in joint_inputs if role_of(node).kind is Kind.TANGENT]
    made: dict[Role, Any] = dict(outputs(graphs.forward.graph, Kind.SAVED))
    saved = list(inputs(graphs.backward.graph, *STATE, Kind.SAVED).items())
    integers = [pair for pair in saved if not isinstance(pair[1].meta["val"], Tensor)]
    tensors = [pair for pair in saved if isinstance(pair[1].meta["val"], Tensor)]
    targets, taken = inputs(labelled.graph, Kind.TARGET), {role_of(n).name: n for n in primals}
    for node in (*targets.values(), *(taken[role.name] for role in targets)):
        node.meta["saved_tensor_with_no_vc_check"] = True  # it is to be as the backward finds it
    tensors += targets.items()
    made |= {role: role_of(taken[role.name]) for role in targets}
    tensors.sort(key=lambda pair: bool(pair[1].meta.get("saved_tensor_with_no_vc_check")))
    results = outputs(graphs.forward.graph, *FORWARD_OUTPUT)
    returned = [(role, made.get(role, role)) for role, _ in (*tensors, *integers)]
    incoming = [*(node for _, node in (*integers, *tensors)), *tangents]
    carried = outputs(graphs.backward_input.graph, Kind.DEFERRED)
    computed = dict(outputs(graphs.backward_input.graph, Kind.INPUT_GRAD))
    slots = [(role, computed.get(role)) for role, _ in gradients]
    return AotGraphs(
        graphs,
        _rebuild(graphs.forward, "forward", primals, [*results, *returned]),
        _rebuild(graphs.backward_input, "backward_input", incoming, [*slots, *carried]),
        len(slots),
        tuple(desc.expr() for desc in descs[:num_forward]),
        parameters,
    )


def _rebuild(
    module: fx.GraphModule, name: str, taken: list[fx.Node], returned: list[tuple[Role, Any]]
) -> fx.GraphModule:
    """The same computation with these placeholders, used or not, and these outputs; an output
    given by a role is the placeholder of that role.
    """
    graph = fx.Graph()
    entered: dict[Role, fx.Node] = {}
    for node in taken:
        entered[role_of(node)] = placeholder = graph.placeholder(node.name)
        placeholder.meta = dict(node.meta)
    copies = {node: entered[role] for role, node in inputs(module.graph).items()}
    for node in module.graph.nodes:
        if node.op not in {"placeholder", "output"}:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for role, value in outputs(module.graph, Kind.WRITE):
        into = entered[Role(Kind.TARGET, role.name)]
        graph.call_function(torch.ops.aten.copy_.default, (into, copies[value]))
    made: dict[Any, fx.Node] = {**copies, **entered}
    set_outputs(graph, [(role, made.get(value, value)) for role, value in returned])
    return fx.GraphModule(module, graph, class_name=name)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """The nodes, without the calling convention that the graph may carry."""
    twin = fx.Graph()
    values, output = twin.graph_copy(graph, {}, return_output_node=True)  # type: ignore[misc]
    twin.output(values).meta = dict(output.meta)  # type: ignore[union-attr]
    return twin


def without_deferred(aot: AotGraphs) -> fx.GraphModule:
    """The backward without deferred outputs, as AOTAutograd counts them. It is never run; compiled
    autograd, which copies it instead of calling what was compiled, is refused.
    """
    graph = copy_graph(aot.backward_input.graph)
    output = graph.output_node()
    output.args = (list(output.args[0])[: aot.slots],)  # type: ignore[arg-type]
    with graph.inserting_before(output):
        graph.call_function(torch._assert, (False, _REFUSAL))
    return fx.GraphModule(aot.backward_input, graph, class_name="backward")
