"""nn.Module -> joint forward/backward graph with roles.

Dynamo's full-graph export turns the module's Python into one FX graph; AOTAutograd then
traces forward and backward together and labels every input and output with a descriptor.
With ``torch_internals`` this package is the only place that uses torch's private API.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import fx, nn
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autosplit.capture.cache.environment_key import environment_lines
from autosplit.capture.cache.fingerprint import traced_value
from autosplit.capture.cache.split_graph_cache import CacheEntry, PredictedResults, SplitGraphCache
from autosplit.capture.effects.observers import unobserved
from autosplit.capture.effects.side_effects import (
    AttributeSnapshot,
    PythonStateError,
    first_call_differs,
)
from autosplit.capture.workarounds.eager_settings import as_eager
from autosplit.capture.workarounds.margin_losses import (
    Decompositions,
    refuse_unbatched,
    right_decompositions,
    trace_as_run,
)
from autosplit.capture.workarounds.recurrent_layers import divide_layers
from autosplit.passes import Role, SplitGraphs
from autosplit.torch_internals.dtensor import Sharding
from autosplit.torch_internals.pytree import TreeSpec, flatten_named, tree_flatten, tree_unflatten

from .calls.kept_call import KeptCall
from .diagnosis import ConstructionError, user_errors
from .dtensor_roles import shardings
from .export import export
from .guards import Guards
from .input_sizes import InputSizes, is_open
from .module_paths import name_modules
from .pytree_objects import hold
from .roles import ModuleRoles, canonical_names, with_roles

__all__ = [
    "AttributeSnapshot",
    "Capture",
    "ConstructionError",
    "Guards",
    "PythonStateError",
    "SplitGraphCache",
    "capture",
    "first_call_differs",
]

_OWN_STORAGE = {OutputType.non_alias, OutputType.unsafe_view_alias}


@dataclasses.dataclass(frozen=True)
class Capture:
    """A traced module.

    Attributes:
        joint: the joint graph; a forward-only graph where nothing needs a gradient.
        inputs: path of every leaf of ``(args, kwargs)``, tensors and others.
        outputs: path of every leaf of the result.
        output_spec: how the leaves make up the module's result.
        guards: whether the graph still fits the module, asked before every use.
        split: what was made of the joint graph before, where that was kept.
        entry: its place in the cache; None where nothing is looked up or kept.
        shardings: role of what is a DTensor outside of the graph -> how it lies over ranks.
        sizes: where the inputs say the sizes that the graph leaves open; None where it leaves none.
    """

    joint: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_spec: TreeSpec
    guards: Guards
    split: SplitGraphs | None = None
    entry: CacheEntry | None = None
    shardings: Mapping[Role, Sharding] = dataclasses.field(default_factory=dict)
    sizes: InputSizes | None = None


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions = None,
    cache: SplitGraphCache | None = None,
    *,
    by_value: bool = False,
) -> Capture:
    """Trace ``module(*args, **kwargs)`` without running it on real data.

    Shapes, dtypes, devices, ``requires_grad`` of parameters and inputs, train/eval mode,
    grad mode and autocast are those in force now. Sizes that ``leave_open`` was told of may become
    symbols; then ``guards.settle()`` is for the caller, once the graph was rewritten.
    Outputs that alias an input or each other become copies, so that every output has a gradient
    of its own.

    Args:
        module: what to trace.
        args: example positional inputs.
        kwargs: example keyword inputs.
        decompositions: operators to trace through, for a backend that wants them so.
        cache: where to look for what was made of the same graph before.
        by_value: as for ``export``.

    Raises:
        CaptureError: the module cannot be traced into one graph; names the user's line.
    """
    with user_errors(module), _same_tensors(module), unobserved():
        call = _call(cache, module, args, kwargs, decompositions, by_value)
        found = _found(cache, call, module, args, kwargs)
        if found is not None:
            return found
        exported, guards = export(module, args, kwargs, by_value=by_value, call=call)
        divide_layers(exported)
        refuse_unbatched(exported)
        name_modules(exported, module)
        inputs = _input_names(args, kwargs)
        foreseen, entry = _look_up(cache, module, exported, inputs, (args, kwargs), decompositions)
        open_sizes = InputSizes(exported, args, kwargs) if is_open(args, kwargs) else None
        if entry and foreseen and call:
            places = open_sizes.places if open_sizes is not None else {}
            known: dict[str, Any] = {"names": foreseen.names, "spec": foreseen.spec}
            entry.traced = partial(call.keep, **known, places=places)
            entry.why_traced = call.reason
        elif entry and entry.symbols:
            entry.why_traced = "sizes are left open under a budget"
        kept = entry.find(exported.meta["fake_mode"]) if entry else None
        if kept and foreseen:
            split, lying = kept
            made = split.joint, inputs, foreseen.names, foreseen.spec, guards, split, entry
            return Capture(*made, shardings=lying, sizes=open_sizes or None)
        trace_as_run(exported)
        results = _Results(exported)
        joint = _joint(module, exported, args, kwargs, decompositions)
        aliased = [
            index
            for index, info in enumerate(joint._aot_state.fw_metadata.output_info)
            if info.output_type not in _OWN_STORAGE
        ]
        if aliased:
            results.copied.update(aliased)
            joint = _joint(module, exported, args, kwargs, decompositions)
    if entry and foreseen and (foreseen.names, foreseen.spec) != (results.names, joint.out_spec):
        entry.give_up("tracing found other results than were predicted")
    roles = ModuleRoles(canonical_names(module), inputs, results.names)
    leaves = tree_flatten((args, kwargs))[0]
    lying = {roles.of(desc): each for desc, each in shardings(joint, module, leaves).items()}
    graph = with_roles(joint.graph_module, roles)
    return Capture(
        graph,
        inputs,
        results.names,
        joint.out_spec,
        guards,
        entry=entry,
        shardings=lying,
        sizes=open_sizes or None,
    )


def _call(
    cache: SplitGraphCache | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions,
    by_value: bool,
) -> KeptCall | None:
    """The call's place in the cache; None where nothing is looked up."""
    varies = is_open(args, kwargs)
    if cache is None or (varies and cache.exact):
        return None

    def environment() -> Iterator[str]:
        yield from cache.options
        yield from environment_lines(decompositions)
        yield from map("takes {}".format, _input_names(args, kwargs))
        yield f"by value {by_value}"

    return KeptCall.of(cache.store, module, args, kwargs, environment(), varies)


def _found(
    cache: SplitGraphCache | None,
    call: KeptCall | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Capture | None:
    """The capture of a call that was kept with its graphs."""
    known = None if call is None else Guards.found(module, args, kwargs, call)
    if known is None or cache is None:
        return None
    guards, call_found = known
    mode, symbols = call_found.open_sizes or (FakeTensorMode(shape_env=ShapeEnv()), None)
    entry = CacheEntry(cache.store, call_found.graphs, symbols=symbols, assumed=True)
    kept = entry.find(mode)
    if kept is None:
        return None
    split, lying = kept
    sizes = None
    if symbols is not None:
        places = {symbols.order[number]: each for number, each in call_found.places.items()}
        sizes = InputSizes.known(mode.shape_env, places, args, kwargs) or None
    names = _input_names(args, kwargs)
    made = split.joint, names, call_found.names, call_found.spec, guards, split, entry
    return Capture(*made, shardings=lying, sizes=sizes)


def _look_up(
    cache: SplitGraphCache | None,
    module: nn.Module,
    exported: fx.GraphModule,
    names: tuple[str, ...],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    decompositions: Decompositions,
) -> tuple[PredictedResults | None, CacheEntry | None]:
    """What tracing will find that the module returns, and the graph's place in the cache."""
    if cache is None:
        return None, None
    try:
        foreseen = _foresee(exported, *inputs)
    except Exception as error:  # the user's classes are put together from tensors without data here
        reason = f"its results are known only when it is traced ({type(error).__name__}: {error})"
        return None, cache.without_key(reason)
    return foreseen, cache.entry(module, exported, names, inputs, foreseen, decompositions)


def _foresee(
    exported: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PredictedResults:
    """Predict the results that tracing will find.

    Raises:
        Exception: what the user's classes raise for tensors without data.
    """
    codegen: Any = exported.graph._codegen
    outputs: Any = exported.graph.output_node().args[0]
    values = [traced_value(node) if isinstance(node, fx.Node) else node for node in outputs]
    tree = hold(codegen.dynamo_bytecode_unflatten(values, (*args, *kwargs.values())))
    leaves, spec = tree_flatten(tree)
    return PredictedResults(tuple(name for name, _ in flatten_named("output", tree)), leaves, spec)


def _joint(
    module: nn.Module,
    exported: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions,
) -> Any:
    decompositions = right_decompositions(decompositions)
    context = exported.meta.get("tracing_context")
    if context is None:
        context = TracingContext(exported.meta["fake_mode"])
    # The stack closes before anything real runs, or the fake mode would still be on. Passes change
    # the graph; to write its code as Python after each would take longer than they do.
    lazy = _use_lazy_graph_module(True)
    with (
        contextlib.ExitStack() as stack,
        tracing(context),
        as_eager(exported, decompositions),
        lazy,
    ):
        return aot_export_joint_with_descriptors(
            stack, exported, args, kwargs, decompositions=decompositions
        )


@contextlib.contextmanager
def _same_tensors(module: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers after tracing, as AOTAutograd leaves its own where a submodule
    has two names.
    """
    spaces = [s for part in module.modules() for s in (part._parameters, part._buffers)]
    before = [dict(space) for space in spaces]
    try:
        yield
    finally:
        for space, tensors in zip(spaces, before, strict=True):
            space.update(tensors)  # type: ignore[arg-type]


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
        own = self._original
        args, kwargs = own.input_processor(inputs)
        put_together = own.out.forward_callable(
            compiled_fn=lambda *_: leaves, extra_globals=own.f_globals
        )
        tree = hold(put_together(*args, **kwargs))
        self.names = tuple(name for name, _ in flatten_named("output", tree))
        values, spec = tree_flatten(tree)
        for index in self.copied:
            values[index] = values[index].clone()
        return hold(tree_unflatten(values, spec))


def _input_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Paths of all leaves of a call's inputs."""
    return tuple(_input_name(name) for name, _ in flatten_named("", (args, kwargs)))


def _input_name(path: str) -> str:
    """``[0][1]`` -> ``args[1]``; ``[1]['mask']`` -> ``mask``."""
    if path.startswith("[0]"):
        return "args" + path.removeprefix("[0]")
    key, _, rest = path.removeprefix("[1]['").partition("']")
    return key + rest
