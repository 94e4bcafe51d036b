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

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autosplit.capture.cache.environment_key import environment_lines
from autosplit.capture.cache.split_graph_cache import CacheEntry, PredictedResults, SplitGraphCache
from autosplit.capture.effects.observers import unobserved
from autosplit.capture.effects.side_effects import (
    AttributeSnapshot,
    PythonStateError,
    first_call_differs,
)
from autosplit.capture.workarounds.margin_losses import (
    Decompositions,
    refuse_unbatched,
    trace_as_run,
)
from autosplit.capture.workarounds.recurrent_layers import divide_layers
from autosplit.passes import Role, SplitGraphs
from autosplit.torch_internals.dtensor import Sharding
from autosplit.torch_internals.pytree import TreeSpec, flatten_named

from .calls.kept_call import KeptCall
from .diagnosis import ConstructionError, user_errors
from .export import export
from .guards import Guards
from .input_sizes import InputSizes, is_open
from .joint_trace import trace_joint
from .module_paths import name_modules
from .predicted_results import foresee
from .regions.callable_blocks import are_captured as regions_wanted
from .regions.expansion import expand
from .regions.operators import tracing_calls
from .regions.session import RegionSession, SplitBlock
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
    split: SplitBlock | None = None,
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
        split: captures and splits a block. With it, blocks that the module has several of are
            captured once a kind, and called by the joint graph.

    Raises:
        CaptureError: the module cannot be traced into one graph; names the user's line.
    """
    with user_errors(module), _same_tensors(module), unobserved():
        call = _call(cache, module, args, kwargs, decompositions, by_value)
        found = _found(cache, call, module, args, kwargs)
        if found is not None:
            return found
        if split is not None and regions_wanted() and not is_open(args, kwargs):
            around = _around_regions(module, args, kwargs, decompositions, by_value, split)
            if around is not None:
                return around
        exported, guards = export(module, args, kwargs, by_value=by_value, call=call)
        _prepare(module, exported)
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
            known_graphs, lying = kept
            made = known_graphs.joint, inputs, foreseen.names, foreseen.spec, guards
            return Capture(*made, known_graphs, entry, shardings=lying, sizes=open_sizes or None)
        traced = _traced(module, exported, guards, (args, kwargs), decompositions)
    if (
        entry
        and foreseen
        and (foreseen.names, foreseen.spec) != (traced.outputs, traced.output_spec)
    ):
        entry.give_up("tracing found other results than were predicted")
    return dataclasses.replace(traced, entry=entry, sizes=open_sizes or None)


def _around_regions(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions,
    by_value: bool,
    split: SplitBlock,
) -> Capture | None:
    """The module with its repeated blocks captured once a kind; None where it has none."""
    refused: dict[str, str] = {}
    for _ in range(_ATTEMPTS):
        session = RegionSession(module, split, refused)
        if not session:
            return None
        before = len(refused)
        try:
            exported, guards = export(module, args, kwargs, by_value=by_value, regions=session)
            calls = session.bind(exported)
            if not calls:
                return None
            _prepare(module, exported)
            guards.blocks = [call.guards for call in calls]
            names = {id(tensor): name for name, tensor in _state(module)}
            with session.tokens(calls), tracing_calls(calls):
                captured = _traced(module, exported, guards, (args, kwargs), decompositions)
            session.check(calls)
            expand(captured.joint, calls, names)
            return captured
        except Exception:
            if len(refused) == before:
                return None
    return None


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _prepare(module: nn.Module, exported: fx.GraphModule) -> None:
    """Make Dynamo's graph one that AOTAutograd traces as it runs, with the module's names in it."""
    divide_layers(exported)
    refuse_unbatched(exported)
    name_modules(exported, module)


def _traced(
    module: nn.Module,
    exported: fx.GraphModule,
    guards: Guards,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    decompositions: Decompositions,
) -> Capture:
    """The joint graph of what Dynamo exported."""
    trace_as_run(exported)
    traced = trace_joint(module, exported, given, decompositions)
    inputs = _input_names(*given)
    roles = ModuleRoles(canonical_names(module), inputs, traced.names)
    lying = {roles.of(desc): each for desc, each in traced.shardings.items()}
    joint = with_roles(traced.graph, roles)
    return Capture(joint, inputs, traced.names, traced.spec, guards, shardings=lying)


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
    try:
        foreseen = foresee(exported, *inputs)
    except Exception as error:  # the user's classes are put together from tensors without data here
        reason = f"its results are known only when it is traced ({type(error).__name__}: {error})"
        return None, None if cache is None else cache.without_key(reason)
    if cache is None:
        return foreseen, None
    return foreseen, cache.entry(module, exported, names, inputs, foreseen, decompositions)


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


def _input_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Paths of all leaves of a call's inputs."""
    return tuple(_input_name(name) for name, _ in flatten_named("", (args, kwargs)))


def _input_name(path: str) -> str:
    """``[0][1]`` -> ``args[1]``; ``[1]['mask']`` -> ``mask``."""
    if path.startswith("[0]"):
        return "args" + path.removeprefix("[0]")
    key, _, rest = path.removeprefix("[1]['").partition("']")
    return key + rest
