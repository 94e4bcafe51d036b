"""``capture_graph``: one graph that Dynamo found, as a joint graph with roles.

Traced as a module is. What AOTAutograd keeps out of graphs is done around each call by its own
wrappers, as under any other backend of ``torch.compile``: writes into inputs, outputs that are
views of inputs or of each other, inputs that are the same tensor or share memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._dynamo.exc import RestartAnalysis
from torch._functorch._aot_autograd import descriptors as d
from torch._functorch._aot_autograd.graph_compile import _apply_tensorify_python_scalars
from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper, post_compile
from torch._functorch._aot_autograd.schemas import MutationType, TensorAlias

from autosplit.capture.workarounds.custom_functions import return_tensors_once
from autosplit.capture.workarounds.dynamo import inline_compile_regions
from autosplit.capture.workarounds.operators import Decompositions
from autosplit.errors import CaptureError
from autosplit.passes import Kind, Role
from autosplit.passes.analysis.aliasing import storage_root
from autosplit.passes.graph import STATE, placeholders

from .guards import DynamosGuards
from .input_sizes import InputSizes
from .joint_graph import Capture, export_joint
from .roles import DescriptorRoles, is_mesh, shardings, whole, with_roles

# What AOTAutograd made of inputs that share memory, and tensors that are attributes of the graph.
_OTHERS = (d.ViewBaseAOTInput, d.SyntheticBaseAOTInput, d.ParamAOTInput, d.BufferAOTInput)

Boxed = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class GraphRoles(DescriptorRoles):
    """Roles in the joint graph of one graph that Dynamo found; results go by their expressions."""

    known: Mapping[Any, Role]

    def primal(self, desc: Any) -> Role | None:
        return self.known.get(desc)

    def result(self, desc: Any) -> str | None:
        known = isinstance(desc, d.PlainAOTOutput | d.IntermediateBaseAOTOutput)
        return desc.expr() if known else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphCapture(Capture):
    """A graph of Dynamo, traced, and AOTAutograd's calling convention for it.

    Attributes:
        taken: role of each value that AOTAutograd hands over, in its order.
        results: names of what it wants back, in its order.
        aliases: those of them that it makes anew from inputs and other results.
        around: what AOTAutograd does around each call: takes the graph, boxed, as a function of
            ``taken``, and returns one that Dynamo may call.
    """

    taken: Sequence[Role]
    results: Sequence[str]
    aliases: frozenset[str]
    around: Callable[[Boxed], Callable[..., Any]]

    def hidden(self, name: str, value: Any) -> Any:
        """A result, as autograd is to take it: not as a tensor where it will be made anew."""
        return TensorAlias(value) if name in self.aliases else value


def capture_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    roles: Sequence[Role],
    decompositions: Decompositions,
) -> GraphCapture:
    """Trace a graph that Dynamo found, while it compiles it.

    Args:
        module: the graph.
        example_inputs: what Dynamo calls it with.
        roles: PARAMETER or INPUT and a name, one for each of these. A parameter that the graph
            returns, or writes into, becomes an input: AOTAutograd makes such results from the
            parameter itself, and autograd must find it there.
        decompositions: operators to trace through.

    Raises:
        CaptureError: it cannot be traced, or not be labelled: AOTAutograd refuses some graphs that
            run well (operators that return their argument, writes into one of two inputs that
            share their memory).
    """
    inline_compile_regions(module)
    return_tensors_once(module)
    try:
        traced = export_joint(module, tuple(example_inputs), {}, decompositions)
        joint: fx.GraphModule = traced.graph_module
        _apply_tensorify_python_scalars(joint)
    except RestartAnalysis:
        raise
    except (RuntimeError, AssertionError) as error:
        raise CaptureError(str(error).strip()) from error
    aot = traced._aot_state
    meta, config, wrappers = aot.fw_metadata, aot.aot_config, traced._aot_graph_capture.wrappers
    graph, descs, differs = joint.graph, aot.flat_args_descs, aot.needs_autograd
    names = GraphRoles(_roles(graph, descs, roles, meta))
    taken = [names.input(desc) for desc in descs]
    results = [names.output(desc).name for desc, _ in _results(graph)]
    made = results[meta.num_mutated_inp_runtime_indices :]
    lying = shardings(traced, module, example_inputs)
    values = {node.meta["desc"]: node.meta["val"] for node in placeholders(graph)}
    pairs = zip(taken, descs, strict=True)
    given = [(role.name, values.get(desc)) for role, desc in pairs if role.kind not in STATE]
    sizes = InputSizes(traced.fake_mode.shape_env, dict(enumerate(value for _, value in given)))
    if sizes and lying:
        raise CaptureError("DTensors of any size are not split")
    runtime = RuntimeWrapper(_idle(graph, descs, meta), differs, disable_amp=False)
    held = [each for _, each in module.named_parameters(remove_duplicate=False)]
    held += [each for _, each in module.named_buffers(remove_duplicate=False)]  # type: ignore[misc]

    def around(call: Boxed) -> Callable[..., Any]:
        wrapped = runtime.post_compile(call, config, runtime_metadata=meta)
        run = post_compile(wrappers, wrapped, config, runtime_metadata=meta)[0]
        return lambda *args: run([*held, *args])

    return GraphCapture(
        with_roles(joint, names),
        tuple([name for name, _ in given]),
        tuple(made),
        traced.out_spec,
        DynamosGuards(),
        shardings={names.of(desc): each for desc, each in lying.items()},
        sizes=sizes or None,
        taken=taken,
        results=results,
        aliases=frozenset([made[at] for at in meta.aliased_out_indices if differs]),
        around=around,
    )


def _returned(graph: fx.Graph) -> list[tuple[Any, Any]]:
    """Descriptor and value of each result of a joint graph, meshes left out."""
    output = graph.output_node()
    pairs = zip(output.meta["desc"], output.args[0], strict=True)  # type: ignore[arg-type]
    return [(whole(desc), value) for desc, value in pairs if desc is not None and not is_mesh(desc)]


def _results(graph: fx.Graph) -> list[tuple[Any, Any]]:
    """Descriptor and value of each result of the forward."""
    return [pair for pair in _returned(graph) if not isinstance(pair[0], d.GradAOTOutput)]


def _with_gradient(graph: fx.Graph) -> set[Any]:
    """Descriptors of the inputs that have a gradient."""
    pairs = [pair for pair in _returned(graph) if isinstance(pair[0], d.GradAOTOutput)]
    return {desc.grad_of for desc, value in pairs if value is not None}


def _roles(
    graph: fx.Graph, descs: Sequence[Any], given: Sequence[Role], meta: Any
) -> dict[Any, Role]:
    """Role of each input of the forward, by its descriptor."""
    trained, known = _with_gradient(graph), dict[Any, Role]()
    roots = [storage_root(value) for _, value in _results(graph) if isinstance(value, fx.Node)]
    changed = [info.mutation_type is not MutationType.NOT_MUTATED for info in meta.input_info]
    outside = _inputs(roots) | {desc for desc, each in zip(descs, changed, strict=True) if each}
    static = {descs[at] for at in meta.static_input_indices}
    for desc in descs:
        if isinstance(desc, d.PlainAOTInput):
            name, kind = given[desc.idx].name, given[desc.idx].kind
        elif isinstance(desc, _OTHERS):
            name, kind = desc.expr(), Kind.INPUT
        else:
            continue
        if desc in outside:
            kind = Kind.INPUT
        elif desc not in trained:
            kind = Kind.BUFFER if desc in static else Kind.INPUT
        known[desc] = Role(kind, name)
    return known


def _inputs(nodes: Iterable[Any]) -> set[Any]:
    """Descriptors of those nodes that are inputs."""
    return {whole(node.meta["desc"]) for node in nodes if node.op == "placeholder"}


def _idle(graph: fx.Graph, descs: Sequence[Any], meta: Any) -> list[int]:
    """Places of what was computed before the graph and gets no gradient from it, which autograd is
    not to go back to.
    """
    trained = _with_gradient(graph)
    infos = enumerate(zip(descs, meta.input_info, strict=True))
    return [
        at
        for at, (desc, info) in infos
        if info.requires_grad and not info.is_leaf and desc not in trained
    ]
