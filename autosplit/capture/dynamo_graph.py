"""A model under ``torch.compile`` with a backend of autosplit, and captures of Dynamo's graphs.

``capture_graph`` traces one of Dynamo's graphs into a joint graph with roles, as ``capture`` traces
a module. Graphs contain no writes into inputs, no outputs that are views of inputs or of each
other, and no inputs that are one tensor or share memory. AOTAutograd's wrappers handle all of these
around each call, as under any other backend of ``torch.compile``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.exc import (
    BackendCompilerFailed,
    InternalTorchDynamoError,
    RestartAnalysis,
    SkipFrame,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch._aot_autograd import descriptors as d
from torch._functorch._aot_autograd.graph_compile import _apply_tensorify_python_scalars
from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper, post_compile
from torch._functorch._aot_autograd.schemas import MutationType, TensorAlias
from torch._guards import TracingContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from autosplit.capture.guards import DynamosGuards
from autosplit.capture.input_sizes import InputSizes
from autosplit.capture.joint_graph import Capture, export_joint
from autosplit.capture.roles import DescriptorRoles, is_mesh, shardings, whole, with_roles
from autosplit.capture.side_effects import refuse_own_generators
from autosplit.capture.workarounds.custom_functions import (
    refuse_absent_gradients,
    return_tensors_once,
)
from autosplit.capture.workarounds.dynamo import inline_compile_regions, refuse_written_deques
from autosplit.capture.workarounds.operators import (
    AS_IN_EAGER,
    Decompositions,
    refuse_traced_otherwise,
)
from autosplit.errors import CaptureError, ShardedError, SplitError
from autosplit.passes import Kind, Role
from autosplit.passes.analysis.aliasing import storage_root
from autosplit.passes.graph import STATE, placeholders
from autosplit.torch_internals.dynamo import input_sources

_ROOT = re.compile(r"[LG]\['\w+'\]")
_MARK = "_is_torch_compile"  # an attribute meant for the wrapper that ``torch.compile`` returns


def compile_model(
    model: nn.Module, backend: Callable[[fx.GraphModule, Sequence[Any]], Any]
) -> Callable[..., Any]:
    """Wrap the model in ``torch.compile(model, backend=backend)``.

    Raises:
        CaptureError: the model draws random numbers in a way that ``torch.compile`` gets wrong.
    """
    refuse_own_generators(model)
    # Dynamo stores compiled code with the code object, which modules of one class share. From torch
    # 2.13 on it can count recompilations for each module separately.
    isolate = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    options = {"isolate_recompiles": True} if isolate else {}
    was_marked = _MARK in vars(model)
    compiled = torch.compile(model, backend=backend, **options)  # type: ignore[call-overload]
    if not was_marked:  # the model is also called without the wrapper, and must stay as it was
        vars(model).pop(_MARK, None)

    def call(*args: Any, **kwargs: Any) -> Any:
        """Call the compiled model; raise the errors that Dynamo wrapped."""
        with torch._dynamo.config.patch(AS_IN_EAGER):
            try:
                return compiled(*args, **kwargs)
            except BackendCompilerFailed as error:
                if isinstance(error.inner_exception, ShardedError):
                    raise error.inner_exception from None
                raise
            except InternalTorchDynamoError as error:
                if str(error).startswith("RecursionError"):
                    raise RecursionError(str(error)) from error
                raise

    return call


def traced_modules(module: fx.GraphModule) -> list[nn.Module]:
    """The modules that a graph's code refers to, while Dynamo compiles it: the module whose
    ``forward`` is compiled, or the modules that a function reads.
    """
    frame = InstructionTranslator.current_tx().output.root_tx
    scope = {"L": frame.f_locals, "G": frame.f_globals}
    names = {match[0] for source in input_sources(module) if (match := _ROOT.match(source))}
    values = [eval(name, scope) for name in names] + [*frame.f_locals.values()]
    return list({id(value): value for value in values if isinstance(value, nn.Module)}.values())


def frozen_parameters(example_inputs: Sequence[Any]) -> list[int]:
    """Positions of frozen parameters, for which a graph computes no gradient."""
    return [
        index
        for index, value in enumerate(example_inputs)
        if isinstance(value, nn.Parameter) and not value.requires_grad
    ]


def refuse_thawed(args: Sequence[Any], frozen: Sequence[int]) -> None:
    """Raise if a graph is called with a formerly frozen parameter that now needs a gradient.

    Dynamo compiles another graph for such a call, except in torch 2.11 with its default settings.

    Raises:
        SplitError: a parameter was thawed since compilation.
    """
    if frozen and torch.is_grad_enabled() and any(args[index].requires_grad for index in frozen):
        raise SplitError(
            "a parameter that was frozen when torch.compile compiled this graph now needs a "
            "gradient, and torch 2.11 does not recompile for it; set "
            "use_recursive_dict_tags_for_guards and skip_tensor_guards_with_matching_dict_tags of "
            "torch._dynamo.config to False before compiling, or use torch 2.12 or later"
        )


def skip_mistraced_frames(module: fx.GraphModule) -> None:
    """Let Dynamo run a function as ordinary Python if the traced function would return wrong
    results.

    Raises:
        SkipFrame: Dynamo is to run the function as Python.
        CaptureError: the function cannot be traced correctly, and ``fullgraph=True`` requires one
            graph.
    """
    context = TracingContext.try_get()
    translator = InstructionTranslator.current_tx()
    try:
        refuse_absent_gradients(module, [] if context is None else context.traced_code)
        refuse_traced_otherwise(module)
        refuse_written_deques(translator.output.side_effects)
    except CaptureError as error:
        if translator.one_graph:
            raise
        raise SkipFrame(str(error)) from error


def require_runnable(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph if it may run unsplit under ordinary autograd.

    If the function calls ``torch.utils.checkpoint``, Dynamo runs it as ordinary Python instead. In
    a graph, checkpoints do not save the generators' state for their recomputation.

    Raises:
        SkipFrame: the graph has a checkpoint.
    """
    if any(node.target is tag_activation_checkpoint for node in module.graph.nodes):
        raise SkipFrame("the graph uses activation checkpointing and cannot be split")
    return module


# Bases that AOTAutograd makes from inputs that share memory, if the graph writes into one of them.
_SHARED_MEMORY = (d.ViewBaseAOTInput, d.SyntheticBaseAOTInput)
# Tensors that are attributes of the graph.
_ATTRIBUTES = (d.ParamAOTInput, d.BufferAOTInput)

Boxed = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class GraphRoles(DescriptorRoles):
    """Roles in the joint graph of one of Dynamo's graphs. Results are named by their expressions.

    Attributes:
        primals: descriptor of an input of the forward -> its role.
    """

    primals: Mapping[Any, Role]

    def primal(self, desc: Any) -> Role | None:
        return self.primals.get(desc)

    def result(self, desc: Any) -> str | None:
        is_named = isinstance(desc, d.PlainAOTOutput | d.IntermediateBaseAOTOutput)
        return desc.expr() if is_named else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphCapture(Capture):
    """A traced graph of Dynamo, with AOTAutograd's calling convention for it.

    Attributes:
        input_roles: role of each value that AOTAutograd passes to the graph, in order.
        results: names of the values that AOTAutograd expects from the graph, in order.
        aliases: names of results that AOTAutograd recreates after the graph, as views of inputs and
            other results.
        written: positions of Dynamo's inputs that the graph writes into.
        static: positions of Dynamo's inputs that are parameters and buffers.
        wrap: AOTAutograd's wrapper of each call. Takes a boxed function that runs the graph on the
            values of ``input_roles``. Returns a function that Dynamo may call.
    """

    input_roles: Sequence[Role]
    results: Sequence[str]
    aliases: frozenset[str]
    written: frozenset[int]
    static: frozenset[int]
    wrap: Callable[[Boxed], Callable[..., Any]]

    def hide_alias(self, name: str, value: Any) -> Any:
        """The result to return to autograd: ``TensorAlias(value)`` if ``aliases`` contains
        ``name``, else ``value``.
        """
        return TensorAlias(value) if name in self.aliases else value


def capture_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    roles: Sequence[Role],
    decompositions: Decompositions,
) -> GraphCapture:
    """Trace a graph of Dynamo, while Dynamo compiles it.

    Args:
        module: the graph.
        example_inputs: the inputs with which Dynamo calls the graph.
        roles: role of each example input: PARAMETER or INPUT and a name. A parameter that the graph
            returns or writes into becomes an input, because AOTAutograd makes such results from the
            parameter itself, and autograd must find the parameter there.
        decompositions: operators to trace through.

    Raises:
        CaptureError: the graph cannot be traced or labelled. AOTAutograd refuses some graphs that
            run well, such as those with operators that return their argument. Also refused are
            graphs that write into one of several inputs that share memory: AOTAutograd traces them
            for the layout of the first inputs, and Dynamo does not guard that layout.
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
    if any(isinstance(desc, _SHARED_MEMORY) for desc in descs):
        raise CaptureError(
            "the forward writes into an input that shares memory with another input: pass a clone "
            "of one of them"
        )
    names = GraphRoles(_roles(graph, descs, roles, meta))
    input_roles = [names.input(desc) for desc in descs]
    results = [names.output(desc).name for desc, _ in _results(graph)]
    outputs = results[meta.num_mutated_inp_runtime_indices :]
    sharding_by_desc = shardings(traced, module, example_inputs)
    values = {node.meta["desc"]: node.meta["val"] for node in placeholders(graph)}
    pairs = zip(input_roles, descs, strict=True)
    graph_inputs = [(role.name, values.get(desc)) for role, desc in pairs if role.kind not in STATE]
    sizes = InputSizes(
        traced.fake_mode.shape_env, dict(enumerate(value for _, value in graph_inputs))
    )
    if sizes and sharding_by_desc:
        raise CaptureError("DTensor inputs do not support dynamic shapes: pass batches of one size")
    runtime = RuntimeWrapper(_idle(graph, descs, meta), differs, disable_amp=False)
    state = [tensor for _, tensor in module.named_parameters(remove_duplicate=False)]
    state += [tensor for _, tensor in module.named_buffers(remove_duplicate=False)]  # type: ignore[misc]

    def wrap(call: Boxed) -> Callable[..., Any]:
        wrapped = runtime.post_compile(call, config, runtime_metadata=meta)
        run = post_compile(wrappers, wrapped, config, runtime_metadata=meta)[0]
        return lambda *args: run([*state, *args])

    return GraphCapture(
        with_roles(joint, names),
        tuple([name for name, _ in graph_inputs]),
        tuple(outputs),
        traced.out_spec,
        DynamosGuards(),
        shardings={names.role_of(desc): sharding for desc, sharding in sharding_by_desc.items()},
        sizes=sizes or None,
        input_roles=input_roles,
        results=results,
        aliases=frozenset([outputs[at] for at in meta.aliased_out_indices if differs]),
        written=_positions(_written(descs, meta)),
        static=_positions(descs[at] for at in meta.static_input_indices),
        wrap=wrap,
    )


def _returned(graph: fx.Graph) -> list[tuple[Any, Any]]:
    """Return the descriptor and the node of each output of a joint graph. Outputs that are the
    device meshes of DTensors are left out.
    """
    output = graph.output_node()
    pairs = zip(output.meta["desc"], output.args[0], strict=True)  # type: ignore[arg-type]
    return [(whole(desc), value) for desc, value in pairs if desc is not None and not is_mesh(desc)]


def _results(graph: fx.Graph) -> list[tuple[Any, Any]]:
    """(descriptor, value) of each result of the forward."""
    return [pair for pair in _returned(graph) if not isinstance(pair[0], d.GradAOTOutput)]


def _with_gradient(graph: fx.Graph) -> set[Any]:
    """Descriptors of the inputs for which the graph returns a gradient."""
    pairs = [pair for pair in _returned(graph) if isinstance(pair[0], d.GradAOTOutput)]
    return {desc.grad_of for desc, value in pairs if value is not None}


def _roles(
    graph: fx.Graph, descs: Sequence[Any], example_roles: Sequence[Role], meta: Any
) -> dict[Any, Role]:
    """Role of each input of the forward, by its descriptor."""
    trained, roles = _with_gradient(graph), dict[Any, Role]()
    roots = [storage_root(value) for _, value in _results(graph) if isinstance(value, fx.Node)]
    outside = _inputs(roots) | _written(descs, meta)
    static = {descs[at] for at in meta.static_input_indices}
    for desc in descs:
        if isinstance(desc, d.PlainAOTInput):
            name, kind = example_roles[desc.idx].name, example_roles[desc.idx].kind
        elif isinstance(desc, _ATTRIBUTES):
            name, kind = desc.expr(), Kind.INPUT
        else:
            continue
        if desc in outside:
            kind = Kind.INPUT
        elif desc not in trained:
            kind = Kind.BUFFER if desc in static else Kind.INPUT
        roles[desc] = Role(kind, name)
    return roles


def _written(descs: Sequence[Any], meta: Any) -> set[Any]:
    """Descriptors of the inputs that the graph writes into."""
    infos = zip(descs, meta.input_info, strict=True)
    return {desc for desc, info in infos if info.mutation_type is not MutationType.NOT_MUTATED}


def _positions(descs: Iterable[Any]) -> frozenset[int]:
    """Positions of Dynamo's inputs with these descriptors."""
    return frozenset([desc.idx for desc in descs if isinstance(desc, d.PlainAOTInput)])


def _inputs(nodes: Iterable[Any]) -> set[Any]:
    """Descriptors of the inputs among these nodes."""
    return {whole(node.meta["desc"]) for node in nodes if node.op == "placeholder"}


def _idle(graph: fx.Graph, descs: Sequence[Any], meta: Any) -> list[int]:
    """Positions of inputs that earlier operators computed with autograd, but for which the graph
    returns no gradient. Autograd must not continue its backward into them.
    """
    trained = _with_gradient(graph)
    infos = enumerate(zip(descs, meta.input_info, strict=True))
    return [
        at
        for at, (desc, info) in infos
        if info.requires_grad and not info.is_leaf and desc not in trained
    ]
