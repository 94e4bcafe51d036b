"""Capture of an ``nn.Module`` as a joint graph, whose inputs and outputs have roles.

Dynamo's full-graph export turns the module's Python into one FX graph; AOTAutograd then
traces forward and backward together and labels every input and output with a descriptor.
This package and ``torch_internals`` are the only places that use torch's private API.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.capture.attribute_values import AttributeValue, values_of
from autosplit.capture.diagnosis import forward_of, user_errors
from autosplit.capture.export import export
from autosplit.capture.gradient_terms import gradient_counts
from autosplit.capture.guards import Guards, unobserved
from autosplit.capture.input_sizes import InputSizes, is_open
from autosplit.capture.module_paths import name_modules
from autosplit.capture.parameter_attributes import attribute_names, named_attributes
from autosplit.capture.region import BlockRegion, expand
from autosplit.capture.region_calls import (
    SplitBlock,
    bind,
    capture_region,
    rebind,
    without_blocks,
)
from autosplit.capture.region_session import RegionSession, capture_around_blocks
from autosplit.capture.roles import ModuleRoles, canonical_names, shardings, with_roles
from autosplit.capture.workarounds.dynamo import without_function_modes
from autosplit.capture.workarounds.operators import (
    Decompositions,
    as_eager,
    refuse_mixed_dtypes,
    refuse_traced_otherwise,
)
from autosplit.errors import CaptureError
from autosplit.passes import Kind, Role
from autosplit.passes.graph import inputs as graph_inputs
from autosplit.passes.graph import placeholders
from autosplit.torch_internals.dtensor import Sharding
from autosplit.torch_internals.operators import written_arguments
from autosplit.torch_internals.pytree import (
    TreeSpec,
    flatten_named,
    hold,
    tree_flatten,
    tree_unflatten,
)

_OWN_STORAGE = {OutputType.non_alias, OutputType.unsafe_view_alias}


@dataclasses.dataclass(frozen=True)
class TracedJoint:
    """A joint graph with AOTAutograd's descriptors.

    Attributes:
        graph: the joint graph; only a forward if nothing needs a gradient.
        names: path of every leaf of the result, then names of the values that the forward sets as
            attributes.
        spec: structure of the result.
        shardings: maps the descriptor of an input or output that is a DTensor for the caller to its
            sharding.
        counts: see ``gradient_counts``.
        returned_inputs: see ``Capture``.
    """

    graph: fx.GraphModule
    names: tuple[str, ...]
    spec: TreeSpec
    shardings: Mapping[Any, Sharding]
    counts: tuple[int | None, ...]
    returned_inputs: Mapping[str, int]


def trace_joint(
    module: nn.Module,
    exported: fx.GraphModule,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    decompositions: Decompositions,
    detached: Collection[str] | None = None,
) -> TracedJoint:
    """Trace forward and backward together. Outputs that alias an input or each other become copies.

    Args:
        module: the exported module.
        exported: Dynamo's graph of the module.
        inputs: (args, kwargs) of the export.
        decompositions: operators to trace through.
        detached: for a block of another graph, paths of results whose gradients nothing needs.
            Inputs that the block returns are then no outputs of its graph.
    """
    results = _Results(exported, detached)
    context = exported.meta.get("tracing_context")
    if context is None:
        context = TracingContext(exported.meta["fake_mode"])
    with tracing(context), _refuse_plain_state(module, exported):
        joint = export_joint(exported, *inputs, decompositions)
    refuse_mixed_dtypes(joint.graph_module.graph)
    infos = joint._aot_state.fw_metadata.output_info
    results.copied = {at for at, info in enumerate(infos) if info.output_type not in _OWN_STORAGE}
    if results.copied:
        with tracing(context):
            joint = export_joint(exported, *inputs, decompositions)
    results.remove()
    sharding_by_desc = shardings(joint, module, tree_flatten(inputs)[0])
    spec = results.spec or joint.out_spec
    return TracedJoint(
        joint.graph_module,
        results.names,
        spec,
        sharding_by_desc,
        results.counts,
        results.returned_inputs,
    )


def export_joint(
    module: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions,
) -> Any:
    """AOTAutograd's export of a joint graph, from a graph of Dynamo. Call it inside of
    ``tracing``.
    """
    # The stack closes before real tensors are computed, because it keeps the fake mode on. The
    # graph module is lazy: generating Python code after each pass would take longer than the
    # passes.
    lazy = _use_lazy_graph_module(True)
    no_modes = without_function_modes()
    with no_modes, contextlib.ExitStack() as stack, as_eager(module, decompositions), lazy:
        return aot_export_joint_with_descriptors(
            stack, module, hold(args), hold(kwargs), decompositions=decompositions
        )


@contextlib.contextmanager
def _refuse_plain_state(module: nn.Module, exported: fx.GraphModule) -> Iterator[None]:
    """Context that refuses a forward that uses a plain tensor of the module, neither a parameter
    nor a buffer. A use is a write (``self.steps += 1``) or a read of the value
    (``self.scale.item()``).

    A plain tensor is real, while the other tensors of a trace are fake. Tracing would really write
    into it, and would record its value as a constant.

    Raises:
        CaptureError: the forward writes into a plain tensor, or reads its value.
    """
    kept = [node for node in placeholders(exported.graph) if _is_kept_tensor(node)]
    if not kept:
        yield
        return
    with _RealTensorUse() as use:  # type: ignore[no-untyped-call]
        try:
            yield
        except Exception as error:
            if not use.written or "mutating a non-functional tensor" in str(error):
                raise  # ``user_errors`` knows its line
    if use.written:
        raise CaptureError(
            f"{forward_of(module)} writes into a tensor that is neither a parameter nor a buffer "
            "(self.steps += 1), which a graph cannot repeat: register the tensor as a buffer"
        )
    if use.value_read and any(map(_is_number, kept)):
        raise CaptureError(
            f"{forward_of(module)} reads the value (.item(), float()) of a tensor that is neither "
            "an input, a parameter nor a buffer. A graph would not see the value change: register "
            "the tensor as a buffer, or store a number"
        )


def _is_kept_tensor(node: fx.Node) -> bool:
    """Whether the node reads a tensor that is an attribute of a module or a global, but not a
    parameter or buffer.
    """
    value, source = node.meta.get("example_value"), repr(getattr(node, "_dynamo_source", ""))
    if not isinstance(value, Tensor):
        return False
    kept = "NNModuleSource" in source or "GlobalSource" in source
    return kept and "'_buffers'" not in source and "'_parameters'" not in source


def _is_number(node: fx.Node) -> bool:
    return all(size == 1 for size in node.meta["example_value"].shape)


class _RealTensorUse(TorchDispatchMode):
    """Dispatch mode that detects uses of real tensors while fake tensors are traced. Writes go into
    copies instead.

    Attributes:
        value_read: whether a value was read.
        written: whether a tensor was to be written.
    """

    value_read = written = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(arg, FakeTensor) for arg in args):
            self.value_read |= torch.Tag.data_dependent_output in func.tags
        if func._schema.is_mutable and _is_real_written(func, args, kwargs):
            self.written = True
            leaves, spec = tree_flatten((args, kwargs))
            copies = [leaf.clone() if _is_real(leaf) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(copies, spec)
        return func(*args, **kwargs)


def _is_real(value: object) -> bool:
    return type(value) is Tensor


def _is_real_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator writes into a tensor with data."""
    return any(map(_is_real, tree_flatten([*written_arguments(func, args, kwargs)])[0]))


class _Results:
    """Replacement for the code that assembles the exported module's results, so that AOTAutograd
    traces it. The replaced code also computes the views of parameters that the module returns
    (``self.weight.mT``).

    Attributes:
        names: path of every leaf of the result, then names of attribute values; set by the trace.
        spec: structure of the result, set by the trace. None if the trace returns no attribute
            values.
        copied: positions of leaves to return as copies.
        counts: see ``gradient_counts``; set by the trace.
        returned_inputs: see ``Capture``; set by the trace.
    """

    def __init__(self, exported: Any, detached: Collection[str] | None) -> None:
        # AOTAutograd interprets the graph and calls this codegen; the original runs untraced.
        self._codegen = codegen = exported.graph._codegen
        self._original = codegen.dynamo_bytecode_unflatten
        self._values = values_of(exported)
        self._detached, self._is_block = detached or (), detached is not None
        self.names: tuple[str, ...] = ()
        self.spec: TreeSpec | None = None
        self.copied: set[int] = set()
        self.counts: tuple[int | None, ...] = ()
        self.returned_inputs: dict[str, int] = {}
        codegen.dynamo_bytecode_unflatten = self

    def remove(self) -> None:
        """Let the exported module be traced again."""
        self._codegen.dynamo_bytecode_unflatten = self._original

    def __call__(self, leaves: Any, inputs: Any) -> Any:
        original = self._original
        args, kwargs = original.input_processor(inputs)
        put_together = original.out.forward_callable(
            compiled_fn=lambda *_: leaves, extra_globals=original.f_globals
        )
        result = put_together(*args, **kwargs)
        tensors: list[Any] = []
        if self._values:
            result, *tensors = result
        tree = hold(result)
        names = [name for name, _ in flatten_named("output", tree)]
        self.names = (*names, *(value.name for value in self._values))
        values, spec = tree_flatten(tree)
        values += tensors
        for index, name in enumerate(names):
            if name in self._detached:
                values[index] = values[index].detach()
        if self._is_block:
            positions = {
                id(leaf): position for position, leaf in enumerate(tree_flatten(inputs)[0])
            }
            for index, value in enumerate(values):
                if isinstance(value, Tensor) and id(value) in positions:
                    self.returned_inputs[names[index]] = positions[id(value)]
                    values[index] = None
        for index in self.copied:
            values[index] = values[index].clone()
        self.counts = gradient_counts(tree_flatten(inputs)[0], values)
        result = hold(tree_unflatten(values[: len(names)], spec))
        if not self._values:
            return result
        self.spec = spec
        return (result, *values[len(names) :])


@dataclasses.dataclass(frozen=True)
class Capture:
    """A traced module: its joint graph, and the names and structure of its inputs and outputs.

    Attributes:
        joint: the joint graph; only a forward if nothing needs a gradient.
        inputs: path of every leaf of ``(args, kwargs)``, including leaves that are not tensors.
        outputs: path of every leaf of the result.
        output_spec: structure of the module's result.
        guards: guards to check before every use of the graph.
        shardings: maps the role of an input or output that is a DTensor for the caller to its
            sharding.
        sizes: reads the values of the graph's symbolic sizes from inputs; None if all sizes are
            fixed.
        values: tensors that the forward sets as attributes of its modules; the graph returns them
            after the result.
        gradient_counts: for each leaf of the inputs, the number of gradients that autograd sums.
        returned_inputs: for a block of another graph, the path of each result that is an input ->
            the input's position among the leaves of ``(args, kwargs)``.
    """

    joint: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_spec: TreeSpec
    guards: Guards
    shardings: Mapping[Role, Sharding] = dataclasses.field(default_factory=dict)
    sizes: InputSizes | None = None
    values: tuple[AttributeValue, ...] = ()
    gradient_counts: tuple[int | None, ...] = ()
    returned_inputs: Mapping[str, int] = dataclasses.field(default_factory=dict)


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions = None,
    *,
    split: SplitBlock | None = None,
    values: bool = False,
    detached: Collection[str] | None = None,
) -> Capture:
    """Trace ``module(*args, **kwargs)`` without running it on real data.

    The graph is for the present shapes, dtypes, devices, ``requires_grad`` of parameters and
    inputs, train/eval mode, grad mode and autocast. Sizes marked by ``leave_open`` may become
    symbols; then the caller must call ``guards.freeze()`` once passes have rewritten the graph.
    Outputs that alias an input or each other become copies, so that every output has its own
    gradient.

    Args:
        module: the module to trace.
        args: example positional inputs.
        kwargs: example keyword inputs.
        decompositions: operators to trace through, if the backend needs them decomposed.
        split: a function that captures and splits one block. If it is passed, repeated blocks of
            the module are captured once for each kind, and the joint graph calls them.
        values: whether the forward may set tensors as attributes of its modules; the graph then
            returns these tensors, and repeated blocks are captured with the module.
        detached: for a block of another graph, paths of results whose gradients nothing needs.
            Inputs that the block returns are then no outputs of its graph.

    Raises:
        CaptureError: the module cannot be traced into one graph; names the user's line.
    """
    with user_errors(module), same_tensors(module), unobserved():
        if split is not None and not values:
            captured = _around_regions(module, args, kwargs, decompositions, split)
            if captured is not None:
                return captured
        exported, guards = export(module, args, kwargs, values=values)
        _prepare(module, exported)
        return _traced(module, exported, guards, (args, kwargs), decompositions, detached)


def _around_regions(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions,
    split: SplitBlock,
) -> Capture | None:
    """Capture the module, and its repeated blocks once for each kind; None if no block can be
    captured separately.
    """

    def captured(session: RegionSession[BlockRegion]) -> Capture:
        """Capture the module in a session."""
        exported, guards = export(module, args, kwargs, regions=session)
        calls = bind(session, exported)
        _prepare(module, exported)
        if not calls:
            return _traced(module, exported, guards, (args, kwargs), decompositions)
        while True:
            guards.blocks = [call.guards for call in calls]
            with without_blocks(session, exported, calls):
                result = _traced(module, exported, guards, (args, kwargs), decompositions)
            if not (again := rebind(session, exported)):
                break
            calls = again
        if not session.is_outdated:
            expand(result.joint, calls, {id(tensor): name for name, tensor in _state(module)})
        return result

    return capture_around_blocks(module, partial(capture_region, split), captured)


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers(), *named_attributes(module)]


def _prepare(module: nn.Module, exported: fx.GraphModule) -> None:
    """Refuse operators that AOTAutograd traces wrongly. Rename modules in Dynamo's graph to the
    model's names.
    """
    refuse_traced_otherwise(exported)
    name_modules(exported, module)


def _traced(
    module: nn.Module,
    exported: fx.GraphModule,
    guards: Guards,
    example_inputs: tuple[tuple[Any, ...], dict[str, Any]],
    decompositions: Decompositions,
    detached: Collection[str] | None = None,
) -> Capture:
    """Make the capture of a module from Dynamo's exported graph."""
    open_sizes = (
        InputSizes.of_export(exported, *example_inputs) if is_open(*example_inputs) else None
    )
    traced = trace_joint(module, exported, example_inputs, decompositions, detached)
    inputs = _input_names(*example_inputs)
    state = canonical_names(module) | attribute_names(exported)
    roles = ModuleRoles(state, inputs, traced.names)
    sharding_by_role = {
        roles.role_of(desc): sharding for desc, sharding in traced.shardings.items()
    }
    joint = with_roles(traced.graph, roles)
    if open_sizes is not None:
        # Dynamo's graph has no input for a tensor that the forward only returns.
        nodes = graph_inputs(joint.graph, Kind.INPUT).items()
        open_sizes.add({inputs.index(role.name): node.meta["val"] for role, node in nodes})
    sizes = open_sizes or None  # tracing may specialise all open sizes
    values = values_of(exported)
    outputs = traced.names[: len(traced.names) - len(values)]
    spec = traced.spec
    counts, returned = traced.counts, traced.returned_inputs
    return Capture(
        joint, inputs, outputs, spec, guards, sharding_by_role, sizes, values, counts, returned
    )


@contextlib.contextmanager
def same_tensors(module: nn.Module) -> Iterator[None]:
    """Context that restores a module's parameters and buffers at its end. AOTAutograd and
    ``torch.func.functional_call`` leave substitutes in a submodule that has two names.
    """
    spaces = [s for part in module.modules() for s in (part._parameters, part._buffers)]
    originals = [dict(space) for space in spaces]
    try:
        yield
    finally:
        for space, tensors in zip(spaces, originals, strict=True):
            space.update(tensors)  # type: ignore[arg-type]


def _input_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Paths of all leaves of a call's inputs."""
    return tuple(_input_name(name) for name, _ in flatten_named("", (args, kwargs)))


def _input_name(path: str) -> str:
    """The name of an input for its path in ``(args, kwargs)``: ``args[1]`` for ``[0][1]``, ``mask``
    for ``[1]['mask']``.
    """
    if path.startswith("[0]"):
        return "args" + path.removeprefix("[0]")
    key, _, rest = path.removeprefix("[1]['").partition("']")
    return key + rest
