"""Dynamo and AOTAutograd around split graphs: all their private API that splitting needs.

AOTAutograd partitions the joint graph of every graph that Dynamo finds by a function of the
backend's choice. Ours labels the joint graph with roles, lets ``autosplit.passes`` split it,
and hands back a forward and a backward in AOTAutograd's calling convention. The backward
computes the gradients of inputs, has None where a deferred parameter's gradient would be,
and returns what W needs behind them. Everything else (aliasing, mutation, random state,
autocast, guards, symbolic shapes) stays AOTAutograd's and Dynamo's work.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import SkipFrame
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch._aot_autograd import descriptors as d
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext

from .capture.as_eager import as_eager
from .capture.custom_functions import refuse_absent_gradients
from .capture.random import AS_IN_EAGER, refuse_own_generators
from .capture.recurrent import divide_layers
from .errors import CaptureError
from .passes import Kind, PassError, Role, SplitGraphs, run
from .passes.aliasing import storage_root
from .passes.graph import (
    FORWARD_OUTPUT,
    STATE,
    inputs,
    outputs,
    placeholders,
    role_of,
    set_outputs,
)
from .passes.ops import is_effect

Boxed = Callable[[list[Any]], list[Any]]

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


@dataclasses.dataclass(frozen=True)
class Splitter:
    """What the caller does with a graph.

    Attributes:
        compile: split graphs -> (F, I), both boxed.
        prepare: called with the joint graph before it is split.
        give_up: called with the reason where a graph cannot be split; it then runs as Dynamo
            made it, under ordinary autograd.
        infer: a graph in which nothing is differentiated -> boxed.
        decompositions: operators to trace through; None for those of eager.
    """

    compile: Callable[[AotGraphs], tuple[Boxed, Boxed]]
    prepare: Callable[[fx.GraphModule], None]
    give_up: Callable[[str], None]
    infer: Callable[[fx.GraphModule], Boxed]
    decompositions: dict[Any, Callable[..., Any]] | None


def compile_graph(
    module: fx.GraphModule, example_inputs: Sequence[Any], roles: list[Role], splitter: Splitter
) -> Callable[..., Any]:
    """Compile a graph that Dynamo found, split where it can be.

    Args:
        module: the graph.
        example_inputs: what Dynamo calls it with.
        roles: PARAMETER or INPUT and a name, one for each example input.
        splitter: what to do with the graphs.
    """
    _skip_what_is_traced_wrongly(module)
    session = _Session(roles, splitter)
    compiler = aot_autograd(
        fw_compiler=session.forward,
        bw_compiler=session.backward,
        inference_compiler=session.inference,
        partition_fn=session.partition,
        decompositions=splitter.decompositions,
    )
    divide_layers(module)
    try:
        with as_eager(module, splitter.decompositions):
            compiled: Callable[..., Any] = compiler(module, example_inputs)
    except (_GivenUpError, RuntimeError) as error:
        # AOTAutograd refuses some graphs that run well (operators that return their argument).
        splitter.give_up(str(error).strip().partition("\n")[0])
        return module
    return compiled


def compile_model(
    model: nn.Module, backend: Callable[[fx.GraphModule, Sequence[Any]], Any]
) -> Callable[..., Any]:
    """``model`` under ``torch.compile`` with a backend of its own.

    Raises:
        CaptureError: the model draws random numbers in a way that ``torch.compile`` gets wrong.
    """
    refuse_own_generators(model)
    # Compiled code is kept with the code object, which modules of one class share: where torch
    # can (from 2.13), the count of recompilations is kept apart for each.
    isolate = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    options = {"isolate_recompiles": True} if isolate else {}
    compiled = torch.compile(model, backend=backend, **options)  # type: ignore[call-overload]

    def call(*args: Any, **kwargs: Any) -> Any:
        # As in a whole-graph capture, recurrent layers are traced into.
        with torch._dynamo.config.patch(allow_rnn=True, **AS_IN_EAGER):
            return compiled(*args, **kwargs)

    return call


def _skip_what_is_traced_wrongly(module: fx.GraphModule) -> None:
    """Have Dynamo run the function as ordinary Python, where a graph is not insisted on."""
    context = TracingContext.try_get()
    try:
        refuse_absent_gradients(module, [] if context is None else context.traced_code)
    except CaptureError as error:
        if InstructionTranslator.current_tx().one_graph:
            raise
        raise SkipFrame(str(error)) from error


class _GivenUpError(Exception):
    """Out of AOTAutograd, whose own partition draws a backward's random numbers in the forward
    and may recompute from a buffer that was overwritten since.
    """


class _Session:
    """The compilation of one graph; AOTAutograd calls its methods in this order."""

    def __init__(self, roles: list[Role], splitter: Splitter) -> None:
        self._roles = roles
        self._splitter = splitter
        self._split: tuple[Boxed, Boxed] | None = None
        self._size = 0

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if any("desc" not in node.meta for node in placeholders(joint.graph)):
            # The body of a higher-order operator, whose call is one node of the graph proper.
            return self._ordinary(joint, joint_inputs, num_fwd_outputs, options)
        static = set(options.get("static_lifetime_input_indices") or ())
        labelled = fx.GraphModule(joint, _copy(joint.graph))
        try:
            parameters = _label(labelled.graph, self._roles, num_fwd_outputs, static)
            self._splitter.prepare(labelled)
            aot = _assemble(labelled, num_fwd_outputs, parameters)
            self._split = self._splitter.compile(aot)
        except PassError as error:
            raise _GivenUpError(str(error)) from error
        self._size = len(aot.forward.graph.nodes)
        return aot.forward, _without_deferred(aot)

    def forward(self, module: fx.GraphModule, example_inputs: Any) -> Any:
        if self._split is None:
            return boxed_nop(module, example_inputs)
        if len(module.graph.nodes) != self._size:
            raise PassError(
                "AOTAutograd changed the forward after it was split (saved-tensor hooks that are "
                "graphs do that); use hooks that are plain functions"
            )
        return _boxed(self._split[0])

    def backward(self, module: fx.GraphModule, example_inputs: Any) -> Any:
        if self._split is None:
            return boxed_nop(module, example_inputs)
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            # Nothing saved is overwritten by our backward, so it may run again (retain_graph).
            context.fw_metadata.bw_donated_idxs = []
        return _boxed(self._split[1])

    def inference(self, module: fx.GraphModule, example_inputs: Any) -> Any:
        if self._splitter.decompositions is None:
            return boxed_nop(module, example_inputs)
        for node in placeholders(module.graph):
            node.meta["role"] = Role(Kind.INPUT, node.name)
        output = module.graph.output_node()
        results: Any = output.args[0]
        output.meta["roles"] = tuple(Role(Kind.OUTPUT, f"[{at}]") for at in range(len(results)))
        return _boxed(self._splitter.infer(module))

    @staticmethod
    def _ordinary(
        joint: fx.GraphModule, joint_inputs: Any, num_fwd_outputs: int, options: dict[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Every operator runs once: AOTAutograd's min-cut partition may recompute from a buffer
        that the forward has overwritten since (seen with torch 2.13).
        """
        forward, backward = default_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        # Random operators that nobody reads would draw again, and move the generator.
        backward.graph.eliminate_dead_code(is_impure_node=_is_kept)
        backward.recompile()
        return forward, backward


def _is_kept(node: fx.Node) -> bool:
    return node.op in {"placeholder", "output"} or is_effect(node)


def _boxed(function: Boxed) -> Boxed:
    def call(args: list[Any]) -> list[Any]:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _label(
    graph: fx.Graph, roles: list[Role], num_forward: int, static: set[int]
) -> dict[int, str]:
    """Give every input and output its role. Returns the parameters that can be deferred."""
    output = graph.output_node()
    descs = list(zip(output.meta["desc"], output.args[0], strict=True))  # type: ignore[arg-type]
    results = descs[:num_forward]
    with_gradient = {_grad_of(desc) for desc, value in descs[num_forward:] if value is not None}
    kept = _kept_whole(results)
    names: dict[Any, Role] = {}
    parameters: dict[int, str] = {}
    for position, node in enumerate(placeholders(graph)):
        desc = node.meta["desc"]
        role = _input_role(desc, roles)
        if role.kind is Kind.PARAMETER and (desc in kept or desc not in with_gradient):
            role = Role(Kind.INPUT, role.name)
        if role.kind is Kind.PARAMETER:
            parameters[desc.idx] = role.name
        elif position in static and desc not in with_gradient and role.kind is Kind.INPUT:
            role = Role(Kind.BUFFER, role.name)
        names[desc] = node.meta["role"] = role
    labels = [_output_role(desc, names, index) for index, (desc, _) in enumerate(results)]
    for position, (desc, value) in enumerate(descs[num_forward:]):
        labels.append(_gradient_role(desc, value, names, position))
    output.args = ([value for _, value in descs],)
    output.meta["roles"] = tuple(labels)
    return parameters


def _kept_whole(results: list[tuple[Any, Any]]) -> set[Any]:
    """Inputs that the graph returns (views of), or writes into: AOTAutograd makes such outputs
    from the input itself, outside the graph, and autograd must find the input there.
    """
    mutated = {desc.mutated_input for desc, _ in results if isinstance(desc, _MUTATION)}
    roots = [storage_root(value) for _, value in results if isinstance(value, fx.Node)]
    return mutated | {root.meta["desc"] for root in roots if root.op == "placeholder"}


_MUTATION = d.InputMutationAOTOutput


def _grad_of(desc: Any) -> Any:
    if isinstance(desc, d.GradAOTOutput):
        return desc.grad_of
    raise PassError(f"the traced backward returns {desc!r}, which autosplit cannot split")


def _input_role(desc: Any, roles: list[Role]) -> Role:
    match desc:
        case d.PlainAOTInput():
            return roles[desc.idx]
        case d.ViewBaseAOTInput() | d.SyntheticBaseAOTInput():
            return Role(Kind.INPUT, desc.expr())
        case d.TangentAOTInput():
            return Role(Kind.TANGENT, desc.output.expr())
    raise PassError(
        f"the traced graph takes {desc!r}, which autosplit cannot split (tensor subclasses and "
        "effect tokens are such inputs)"
    )


def _output_role(desc: Any, names: dict[Any, Role], index: int) -> Role:
    match desc:
        case d.PlainAOTOutput() | d.IntermediateBaseAOTOutput():
            return Role(Kind.OUTPUT, desc.expr())
        case d.InputMutationAOTOutput():
            return Role(Kind.UPDATE, names[desc.mutated_input].name)
    raise PassError(f"the traced forward returns {desc!r}, which autosplit cannot split")


def _gradient_role(desc: Any, value: Any, names: dict[Any, Role], position: int) -> Role:
    """An input without a gradient has no descriptor here; only its position is known."""
    if value is None:
        return Role(Kind.INPUT_GRAD, f"nothing[{position}]")
    source = names[_grad_of(desc)]
    kind = Kind.PARAMETER_GRAD if source.kind is Kind.PARAMETER else Kind.INPUT_GRAD
    return Role(kind, source.name)


def _assemble(labelled: fx.GraphModule, num_forward: int, parameters: dict[int, str]) -> AotGraphs:
    """Split, and put the graphs into AOTAutograd's calling convention: tensors are saved before
    integers, those whose writes autograd does not watch last; the backward takes the integers
    first.
    """
    joint_inputs = placeholders(labelled.graph)
    gradients = outputs(labelled.graph)[num_forward:]
    descs = labelled.graph.output_node().meta["desc"][:num_forward]
    graphs = run(labelled)
    if graphs.backward is None or graphs.backward_input is None:
        raise PassError("nothing in the graph has a gradient")
    primals = [node for node in joint_inputs if role_of(node).kind is not Kind.TANGENT]
    tangents = [node for node in joint_inputs if role_of(node).kind is Kind.TANGENT]
    made = dict(outputs(graphs.forward.graph, Kind.SAVED))
    saved = list(inputs(graphs.backward.graph, *STATE, Kind.SAVED).items())
    integers = [pair for pair in saved if not isinstance(pair[1].meta["val"], Tensor)]
    tensors = [pair for pair in saved if isinstance(pair[1].meta["val"], Tensor)]
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
        tuple(desc.expr() for desc in descs),
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
    values = [entered[value] if isinstance(value, Role) else value for _, value in returned]
    mapped = fx.node.map_arg(values, lambda node: copies.get(node, node))
    set_outputs(graph, list(zip([role for role, _ in returned], mapped, strict=True)))
    return fx.GraphModule(module, graph, class_name=name)


def _copy(graph: fx.Graph) -> fx.Graph:
    """The nodes, without the calling convention that the graph may carry."""
    twin = fx.Graph()
    values, output = twin.graph_copy(graph, {}, return_output_node=True)  # type: ignore[misc]
    twin.output(values).meta = dict(output.meta)  # type: ignore[union-attr]
    return twin


def _without_deferred(aot: AotGraphs) -> fx.GraphModule:
    """The backward as AOTAutograd may see it: it counts the outputs. It is never run; whoever
    copies it (compiled autograd) instead of calling what was compiled is refused.
    """
    graph = _copy(aot.backward_input.graph)
    output = graph.output_node()
    output.args = (list(output.args[0])[: aot.slots],)  # type: ignore[arg-type]
    with graph.inserting_before(output):
        graph.call_function(torch._assert, (False, _REFUSAL))
    return fx.GraphModule(aot.backward_input, graph, class_name="backward")


def input_sources(module: fx.GraphModule) -> list[str]:
    """Where Dynamo found each input of the graph, as Python: ``L['self'].weight``."""
    return [_source(node) for node in placeholders(module.graph)]


def _source(node: fx.Node) -> str:
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return name() if callable(name) else str(name)
