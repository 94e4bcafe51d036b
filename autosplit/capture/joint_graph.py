"""nn.Module -> joint forward/backward graph with roles.

Dynamo's full-graph export turns the module's Python into one FX graph; AOTAutograd then
traces forward and backward together and labels every input and output with a descriptor.
With ``torch_internals`` this package is the only place that uses torch's private API.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.capture.diagnosis import forward_of, user_errors
from autosplit.capture.export import export
from autosplit.capture.guards import Guards, unobserved
from autosplit.capture.input_sizes import InputSizes, is_open
from autosplit.capture.module_paths import name_modules
from autosplit.capture.region import expand, tracing_calls
from autosplit.capture.region_session import RegionSession, SplitBlock, captures_blocks
from autosplit.capture.roles import ModuleRoles, canonical_names, shardings, with_roles
from autosplit.capture.workarounds.operators import (
    Decompositions,
    as_eager,
    refuse_mixed_dtypes,
    refuse_traced_otherwise,
)
from autosplit.errors import CaptureError, PythonStateError
from autosplit.passes import Role
from autosplit.passes.graph import placeholders
from autosplit.torch_internals.dtensor import Sharding
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
        graph: the graph; a forward only where nothing needs a gradient.
        names: path of every leaf of the result.
        spec: how the leaves make up the result.
        shardings: descriptor of what is a DTensor outside of the graph -> how it lies over ranks.
    """

    graph: fx.GraphModule
    names: tuple[str, ...]
    spec: TreeSpec
    shardings: Mapping[Any, Sharding]


def trace_joint(
    module: nn.Module,
    exported: fx.GraphModule,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    decompositions: Decompositions,
) -> TracedJoint:
    """Trace forward and backward together. Outputs that alias an input or each other become copies.

    Args:
        module: what was exported.
        exported: Dynamo's graph of it.
        inputs: positional and keyword ones that it was made for.
        decompositions: operators to trace through.
    """
    results = _Results(exported)
    context = exported.meta.get("tracing_context")
    if context is None:
        context = TracingContext(exported.meta["fake_mode"])
    with tracing(context), _refuse_values_read(module, exported):
        joint = export_joint(exported, *inputs, decompositions)
    refuse_mixed_dtypes(joint.graph_module.graph)
    infos = joint._aot_state.fw_metadata.output_info
    results.copied = {at for at, info in enumerate(infos) if info.output_type not in _OWN_STORAGE}
    if results.copied:
        with tracing(context):
            joint = export_joint(exported, *inputs, decompositions)
    sharding_by_desc = shardings(joint, module, tree_flatten(inputs)[0])
    return TracedJoint(joint.graph_module, results.names, joint.out_spec, sharding_by_desc)


def export_joint(
    module: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions,
) -> Any:
    """AOTAutograd's joint graph of one that Dynamo made; called inside of ``tracing``."""
    # The stack closes before anything real runs, or the fake mode would still be on. Passes change
    # the graph; to write its code as Python after each would take longer than they do.
    lazy = _use_lazy_graph_module(True)
    with contextlib.ExitStack() as stack, as_eager(module, decompositions), lazy:
        return aot_export_joint_with_descriptors(
            stack, module, hold(args), hold(kwargs), decompositions=decompositions
        )


@contextlib.contextmanager
def _refuse_values_read(module: nn.Module, exported: fx.GraphModule) -> Iterator[None]:
    """Refuse forwards that read the value of a tensor of one element that is neither a parameter
    nor a buffer (``self.scale.item()``): tracing has it as a number that never changes.

    Raises:
        CaptureError: the forward does.
    """
    if not any(map(_is_kept_number, placeholders(exported.graph))):
        yield
        return
    with _ValuesRead() as values:  # type: ignore[no-untyped-call]
        yield
    if values.read:
        raise CaptureError(
            f"{forward_of(module)} reads the value of a tensor that it keeps and that may change "
            "(.item(), float()): register it as a buffer, or keep a number"
        )


def _is_kept_number(node: fx.Node) -> bool:
    """Whether it is a tensor of one element of a module or a global, and no parameter or buffer."""
    value, source = node.meta.get("example_value"), repr(getattr(node, "_dynamo_source", ""))
    if not isinstance(value, Tensor) or any(size != 1 for size in value.shape):
        return False
    kept = "NNModuleSource" in source or "GlobalSource" in source
    return kept and "'_buffers'" not in source and "'_parameters'" not in source


class _ValuesRead(TorchDispatchMode):
    """Sees the values of real tensors being read while fake ones are traced."""

    read = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        real = not any(isinstance(arg, FakeTensor) for arg in args)
        self.read = self.read or (real and torch.Tag.data_dependent_output in func.tags)
        return func(*args, **(kwargs or {}))


class _Results:
    """Replacement for the exported module's code that assembles its results, so that it is traced
    too: views of parameters that the module returns (``self.weight.mT``) are made there.

    Attributes:
        names: path of every leaf of the result, known once the module was traced.
        copied: leaves to return as copies.
    """

    def __init__(self, exported: Any) -> None:
        codegen = exported.graph._codegen  # AOTAutograd interprets the graph and asks this one
        self._original = codegen.dynamo_bytecode_unflatten  # which would run out of tracing's sight
        self.names: tuple[str, ...] = ()
        self.copied: set[int] = set()
        codegen.dynamo_bytecode_unflatten = self

    def __call__(self, leaves: Any, inputs: Any) -> Any:
        original = self._original
        args, kwargs = original.input_processor(inputs)
        put_together = original.out.forward_callable(
            compiled_fn=lambda *_: leaves, extra_globals=original.f_globals
        )
        tree = hold(put_together(*args, **kwargs))
        self.names = tuple(name for name, _ in flatten_named("output", tree))
        values, spec = tree_flatten(tree)
        for index in self.copied:
            values[index] = values[index].clone()
        return hold(tree_unflatten(values, spec))


_ATTEMPTS = 4  # captures around blocks, each without those that could not be captured before


@dataclasses.dataclass(frozen=True)
class Capture:
    """A traced module.

    Attributes:
        joint: the joint graph; a forward-only graph where nothing needs a gradient.
        inputs: path of every leaf of ``(args, kwargs)``, tensors and others.
        outputs: path of every leaf of the result.
        output_spec: how the leaves make up the module's result.
        guards: whether the graph still fits the module, asked before every use.
        shardings: role of what is a DTensor outside of the graph -> how it lies over ranks.
        sizes: where the inputs say the sizes that the graph leaves open; None where it leaves none.
    """

    joint: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_spec: TreeSpec
    guards: Guards
    shardings: Mapping[Role, Sharding] = dataclasses.field(default_factory=dict)
    sizes: InputSizes | None = None


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions = None,
    *,
    split: SplitBlock | None = None,
) -> Capture:
    """Trace ``module(*args, **kwargs)`` without running it on real data.

    Shapes, dtypes, devices, ``requires_grad`` of parameters and inputs, train/eval mode,
    grad mode and autocast are those in force now. Sizes that ``leave_open`` was told of may become
    symbols; then ``guards.freeze()`` is for the caller, once the graph was rewritten.
    Outputs that alias an input or each other become copies, so that every output has a gradient
    of its own.

    Args:
        module: what to trace.
        args: example positional inputs.
        kwargs: example keyword inputs.
        decompositions: operators to trace through, for a backend that wants them so.
        split: captures and splits a block. With it, blocks that the module has several of are
            captured once a kind, and called by the joint graph.

    Raises:
        CaptureError: the module cannot be traced into one graph; names the user's line.
    """
    with user_errors(module), same_tensors(module), unobserved():
        if split is not None and captures_blocks():
            captured = _around_regions(module, args, kwargs, decompositions, split)
            if captured is not None:
                return captured
        exported, guards = export(module, args, kwargs)
        _prepare(module, exported)
        return _traced(module, exported, guards, (args, kwargs), decompositions)


def _around_regions(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions,
    split: SplitBlock,
) -> Capture | None:
    """The module with its repeated blocks captured once a kind; None where it has none."""
    refused: dict[str, str] = {}
    for _ in range(_ATTEMPTS):
        session = RegionSession(module, split, refused)
        if not session:
            return None
        refused_count = len(refused)
        try:
            exported, guards = export(module, args, kwargs, regions=session)
            calls = session.bind(exported)
            if not calls:
                return None
            _prepare(module, exported)
            guards.blocks = [call.guards for call in calls]
            names = {id(tensor): name for name, tensor in _state(module)}
            with session.without_blocks(exported, calls), tracing_calls(calls):
                captured = _traced(module, exported, guards, (args, kwargs), decompositions)
            expand(captured.joint, calls, names)
            return captured
        except PythonStateError:  # the whole would be refused, too
            raise
        except Exception:
            if len(refused) == refused_count:
                return None
    return None


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _prepare(module: nn.Module, exported: fx.GraphModule) -> None:
    """Make Dynamo's graph one that AOTAutograd traces as it runs, with the module's names in it."""
    refuse_traced_otherwise(exported)
    name_modules(exported, module)


def _traced(
    module: nn.Module,
    exported: fx.GraphModule,
    guards: Guards,
    example_inputs: tuple[tuple[Any, ...], dict[str, Any]],
    decompositions: Decompositions,
) -> Capture:
    """The joint graph of what Dynamo exported."""
    open_sizes = (
        InputSizes.of_export(exported, *example_inputs) if is_open(*example_inputs) else None
    )
    traced = trace_joint(module, exported, example_inputs, decompositions)
    inputs = _input_names(*example_inputs)
    roles = ModuleRoles(canonical_names(module), inputs, traced.names)
    sharding_by_role = {roles.of(desc): sharding for desc, sharding in traced.shardings.items()}
    joint = with_roles(traced.graph, roles)
    sizes = open_sizes or None  # what is open is known once it was traced
    spec = traced.spec
    return Capture(joint, inputs, traced.names, spec, guards, sharding_by_role, sizes)


@contextlib.contextmanager
def same_tensors(module: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers afterwards, as AOTAutograd leaves its own where a submodule
    has two names, and so does a functional call.
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
    """``[0][1]`` -> ``args[1]``; ``[1]['mask']`` -> ``mask``."""
    if path.startswith("[0]"):
        return "args" + path.removeprefix("[0]")
    key, _, rest = path.removeprefix("[1]['").partition("']")
    return key + rest
