"""``RegionSession``: a capture of a model in which repeated blocks are opaque calls for Dynamo.

``repeated_blocks`` finds the candidates. Blocks that cannot be called as separate graphs are
refused and captured with their model.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import CaptureOutput
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autosplit.capture.guards import BlockGuards
from autosplit.capture.input_sizes import leave_open, sizes_within
from autosplit.capture.region import ANCHOR, BlockRegion, RegionCall, new_anchor
from autosplit.capture.workarounds.dynamo import function_modes_of_the_call
from autosplit.capture.workarounds.key_value_cache import cache_argument, caching
from autosplit.device import accelerator_kind
from autosplit.errors import CaptureError
from autosplit.passes import Kind, SplitGraphs
from autosplit.passes.analysis.aliasing import storage_root
from autosplit.passes.graph import concrete, inputs, outputs
from autosplit.torch_internals.dynamo import traced_value
from autosplit.torch_internals.pytree import TreeSpec, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture

SWITCH = "AUTOSPLIT_REGIONS"


def captures_blocks() -> bool:
    """Whether blocks are captured separately; ``AUTOSPLIT_REGIONS=0`` turns that off."""
    return os.environ.get(SWITCH) != "0"


def refuse_uncallable(region: BlockRegion) -> None:
    """Raise if other graphs cannot call F, I and W of a block.

    Raises:
        CaptureError: the block depends on state that Dynamo's guards do not check, writes into its
            inputs, returns an input or a view of one, or takes or returns values that are not
            tensors.
    """
    capture, graphs = region.capture, region.graphs
    if not capture.guards.has_only_dynamo_guards:
        raise CaptureError(
            "the block reads tensors other than its inputs and state, or sets attributes"
        )
    if capture.shardings:
        raise CaptureError("the block works on DTensors")
    for role, _ in outputs(graphs.joint.graph, Kind.UPDATE):
        if role.name in capture.inputs:
            raise CaptureError(
                f"the block writes into its input {role.name}: return the new value instead"
            )
    if not (region.result_nodes and _is_plain(capture.output_spec)):
        raise CaptureError("the block returns no tensor, or an object other than a tuple or list")
    boundary = [*inputs(graphs.joint.graph).values(), *region.result_nodes.values()]
    inside = [value for part in region.parts.values() for value in _results(part.module)]
    only_tensors = all(isinstance(node.meta["val"], Tensor) for node in boundary)
    if not (only_tensors and all(map(_crosses, inside))):
        raise CaptureError(
            "the block takes or returns numbers that depend on data, such as results of .item(): "
            "pass them as tensors"
        )
    if _are_copied(list(region.result_nodes.values())):
        raise CaptureError("the block returns an input, or a view of an input or another result")


def _are_copied(values: list[fx.Node]) -> bool:
    """Whether a result of a block is a copy that tracing made, because the result shares memory
    with an input or another result. The surrounding graph would not know of the shared memory.
    """
    sources = [
        storage_root(value.args[0])  # type: ignore[arg-type]
        for value in values
        if value.target is torch.ops.aten.clone.default
    ]
    return len({*sources}) < len(sources) or any(source.op == "placeholder" for source in sources)


def _results(module: fx.GraphModule) -> list[fx.Node]:
    return [value for _, value in outputs(module.graph) if isinstance(value, fx.Node)]


def _crosses(node: fx.Node) -> bool:
    """Whether a value may cross from F to I or from I to W: a tensor, or a size of inputs."""
    value = node.meta["val"]
    size = isinstance(value, torch.SymInt) and not free_unbacked_symbols(value)
    return size or isinstance(value, Tensor)


def _is_plain(spec: Any) -> bool:
    """Whether results have a structure that Dynamo accepts from an operator."""
    return spec.is_leaf() or (spec.type in (tuple, list) and all(map(_is_plain, spec.children())))


_HOOKS = re.compile(r"(_global)?_(forward|backward)(_pre)?_hooks")
_FORWARD_OF = re.compile(r"(L\[.*?)\.forward(?!\w)")  # not another attribute
_TABLES = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_TABLES, nn.Sequential)


class BlockModule(nn.Module):
    """A module that is a candidate for a repeated block wherever it is in its model."""


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Map names to repeated blocks: elements of module lists, dictionaries and sequences, and every
    ``BlockModule``, that look like another such element. No block is inside of another block.

    The blocks are candidates. Guards decide whether two blocks can have the same graph.
    """
    shared = _shared_state(model)
    kinds = {
        name: look_of(block)
        for name, block in _elements(model, "")
        if shared.isdisjoint(map(id, (*block.parameters(), *block.buffers())))
    }
    counts = Counter(kinds.values())
    alike = {name for name, look in kinds.items() if counts[look] > 1}
    outermost = {name for name in alike if not any(name.startswith(f"{o}.") for o in alike)}
    return {name: model.get_submodule(name) for name in sorted(outermost)}


def _shared_state(model: nn.Module) -> set[int]:
    """The ``id`` of each parameter and buffer that the model has under several names."""
    names: Counter[int] = Counter()
    for spaces in (model.named_parameters, model.named_buffers):
        names.update(id(tensor) for _, tensor in spaces(remove_duplicate=False))
    return {identity for identity, count in names.items() if count > 1}


def has_plain_forward(block: nn.Module) -> bool:
    """Whether calling the block calls only its class's forward.

    Hooks, and a ``__call__`` other than ``nn.Module.__call__``, are traced with the surrounding
    model; a separate capture of the block would trace them a second time. The ``__call__`` of
    transformers' layers is allowed, because it only adds recomputation. Recomputed blocks are not
    captured separately.
    """
    call = type(block).__call__
    if call is not nn.Module.__call__ and call.__module__ != "transformers.modeling_layers":
        return False
    spaces = (vars(block), vars(torch.nn.modules.module))
    hooks = (hook for space in spaces for name, hook in space.items() if _HOOKS.fullmatch(name))
    return "forward" not in vars(block) and not any(hooks)


def _elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the elements of all containers, if the elements have submodules, and
    of every ``BlockModule``.
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_element = isinstance(module, _CONTAINERS) and not isinstance(child, _TABLES)
        if (is_element and len(child._modules)) or isinstance(child, BlockModule):
            yield path, child
        yield from _elements(child, f"{path}.")


def look_of(block: nn.Module) -> Hashable:
    """A key for a block's structure: blocks with different keys cannot have the same graph."""
    state = [*block.named_parameters(), *block.named_buffers()]
    layout = tuple(
        (name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in state
    )
    return type(block), block.training, layout


SplitBlock = Callable[
    [str, nn.Module, tuple[Any, ...], dict[str, Any]], tuple["Capture", SplitGraphs]
]

_LEAF_TYPES = {FakeTensor, Tensor, nn.Parameter, int, float, bool, str, type(None)}


class RegionRefusedError(Exception):
    """A block cannot be captured by itself."""


class RegionSession:
    """One capture of a model in which Dynamo does not trace into repeated blocks.

    Args:
        model: the model that is captured.
        split: a function that captures and splits a block for one of its calls. Its first argument
            is the name of the block's kind.
        refused: maps the name of a block that is captured with the model to the reason; the session
            adds entries.
        regions: maps a call's signature to the regions captured for it; the session adds entries.
            Sessions of one model share it, so that a later one captures no kind of block again.
    """

    def __init__(
        self,
        model: nn.Module,
        split: SplitBlock,
        refused: dict[str, str],
        regions: dict[Hashable, list[BlockRegion]],
    ) -> None:
        self._model = model
        self._thread = threading.get_ident()
        self._modes = _modes()
        self._split = split
        self.refused = refused
        self._regions = regions
        self._symbols = object()  # part of a signature whose sizes are symbols of this trace
        # The key is the first tensor that a call returns.
        self._matches: dict[Tensor, tuple[BlockRegion, BlockGuards]] = {}
        self._block_by_operator: dict[Any, tuple[str, nn.Module]] = {}
        self._blocks = {
            n: b
            for n, b in repeated_blocks(model).items()
            if n not in refused and has_plain_forward(b)
        }
        self._stand_ins = {
            name: self._stand_in(name, block) for name, block in self._blocks.items()
        }

    def __bool__(self) -> bool:
        return bool(self._blocks)

    @property
    def regions(self) -> list[BlockRegion]:
        """Kinds of blocks, in order of their first calls."""
        return [region for regions in self._regions.values() for region in regions]

    @contextlib.contextmanager
    def opaque(self) -> Iterator[None]:
        """Context in which calls of the blocks are operators that Dynamo does not trace into."""
        for name, block in self._blocks.items():
            vars(block)["forward"] = self._stand_ins[name]
        try:
            yield
        finally:
            for block in self._blocks.values():
                vars(block).pop("forward", None)

    def _stand_in(self, name: str, block: nn.Module) -> Callable[..., Any]:
        plain = self._operator(name, block)
        argument = cache_argument(block)
        if argument is None:
            return plain
        return caching(block, *argument, plain, partial(self._operator, name))

    def _operator(self, name: str, block: nn.Module) -> Callable[..., Any]:
        """A function that calls a block and that Dynamo treats as an operator. It refers weakly to
        the model, because nodes of the graph keep the function alive.
        """
        session, block_ref = weakref.proxy(self), weakref.ref(block)
        thread = self._thread

        def call_block(*args: Any, **kwargs: Any) -> Any:
            block: Any = block_ref()
            if threading.get_ident() != thread:  # another thread calls the model meanwhile
                return type(block).forward(block, *args, **kwargs)
            return session._call_block(name, block, args, kwargs)

        self._block_by_operator[call_block] = name, block
        operator: Callable[..., Any] = torch._dynamo.allow_in_graph(call_block)
        return operator

    def _call_block(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return fake results of a block's call. The block is captured if no earlier capture fits
        the call.
        """
        leaves, spec = tree_flatten((args, kwargs))
        try:
            if _modes() != self._modes:
                raise CaptureError(
                    "the block is called under another grad mode or autocast than the model"
                )
            if _is_changed(block):
                raise CaptureError("the forward of the model changes the block before the call")
            with (
                unset_fake_temporarily(),
                torch._C._DisablePythonDispatcher(),
                function_modes_of_the_call(),
            ):
                match = region, _ = self._match(name, block, leaves, spec)
        except Exception as error:
            self._refuse(name, str(error))
        trained = {role.name for role in region.tangents}
        tensors = {
            path: region.empty(node.meta["val"]) for path, node in region.result_nodes.items()
        }
        result = region.result({path: _computed(v, path in trained) for path, v in tensors.items()})
        self._matches[_first_tensor(result)] = match
        return result

    def _refuse(self, name: str, reason: str) -> NoReturn:
        """Refuse to capture a block, and all blocks that look like it, separately from the model.

        Raises:
            RegionRefusedError: always.
        """
        self._record_refusal(name, reason)
        raise RegionRefusedError(name)

    def _record_refusal(self, name: str, reason: str) -> None:
        """Add a block, and all blocks that look like it, to ``refused``."""
        look = look_of(self._blocks[name])
        self.refused |= {n: reason for n, b in self._blocks.items() if look_of(b) == look}

    def _match(
        self, name: str, block: nn.Module, leaves: list[Any], spec: TreeSpec
    ) -> tuple[BlockRegion, BlockGuards]:
        """Return (region, the block's guards) for a block's call. The region is an existing one if
        its guards hold for the block, else a new one.
        """
        signature = _signature(block, leaves, spec)
        if _has_symbols(leaves):  # another trace may give these names to other sizes
            signature = signature, self._symbols
        stand_in = vars(self._blocks[name]).pop("forward")
        try:
            for region in self._regions.get(signature, ()):
                guards = BlockGuards(region.capture.guards, block, region.args, region.kwargs)
                if guards.hold():
                    return region, guards
            return self._new(name, block, signature, leaves, spec)
        finally:
            vars(self._blocks[name])["forward"] = stand_in

    def _new(
        self,
        name: str,
        block: nn.Module,
        signature: Hashable,
        leaves: list[Any],
        spec: TreeSpec,
    ) -> tuple[BlockRegion, BlockGuards]:
        args, kwargs = tree_unflatten([*map(_blank, leaves)], spec)
        kind = f"{type(self._blocks[name]).__name__}_{len(self.regions)}"
        capture, graphs = self._split(kind, block, args, kwargs)
        region = BlockRegion(
            kind, args, kwargs, capture, graphs, sizes_within(capture.sizes, leaves)
        )
        refuse_uncallable(region)
        self._regions.setdefault(signature, []).append(region)
        return region, BlockGuards(region.capture.guards, block, args, kwargs)

    def forget_stand_ins(self, captured: CaptureOutput, scope: dict[str, Any]) -> None:
        """Drop guards on the functions that replaced the blocks' forwards during the capture."""
        guards = captured.graph_capture_output.output_graph.guards.inner
        blocks = set(map(id, self._blocks.values()))
        for guard in list(guards):
            match = _FORWARD_OF.match(guard.name)
            if match and id(eval(match[1], scope)) in blocks:
                guards.remove(guard)

    @contextlib.contextmanager
    def without_blocks(
        self, exported: fx.GraphModule, calls: Sequence[RegionCall]
    ) -> Iterator[None]:
        """Context in which Dynamo's graph ``exported`` lacks the submodules of the called blocks,
        and has the anchor: a parameter that stands for the parameters of all blocks, so that
        autograd records each call. At its end the blocks are back, because the graph shares its
        submodules with the model.
        """
        anchor = nn.Parameter(new_anchor(), any(call.region.trained for call in calls))
        exported._parameters = {**exported._parameters, ANCHOR: anchor}
        places = []
        for name in {call.name for call in calls}:
            parent, _, key = name.rpartition(".")
            # Nested submodules of the model are the very ones of the graph; top-level ones have two
            # owners.
            owners = [self._model.get_submodule(parent)] if parent else [self._model, exported]
            places += [(owner._modules, key, self._blocks[name]) for owner in owners]
        try:
            for modules, key, _ in places:
                modules[key] = nn.Module()
            yield
        finally:
            for modules, key, block in places:
                modules[key] = block

    def bind(self, exported: fx.GraphModule) -> list[RegionCall]:
        """Make the captured graph call the regions of its blocks, and return the calls.

        Blocks that would sum a gradient in another order than autograd are refused, and called
        nevertheless: the joint graph's trace then finds all other blocks to refuse as well, and its
        result is dropped. Each round of refusals costs another trace of the model.

        Raises:
            RegionRefusedError: a block is called in the body of a higher-order operator.
        """
        graphs = (graph for graph in exported.modules() if isinstance(graph, fx.GraphModule))
        nested = [node for graph in graphs if graph is not exported for node in graph.graph.nodes]
        for node in nested:
            if node.target in self._block_by_operator:
                name, _ = self._block_by_operator[node.target]
                self._refuse(name, "it is called in the body of a higher-order operator")
        nodes = [n for n in exported.graph.nodes if n.target in self._block_by_operator]
        calls: list[RegionCall] = []
        for node in nodes:
            name, block = self._block_by_operator[node.target]
            region, guards = self._matches[_first_tensor(traced_value(node))]
            refuse = partial(self._record_refusal, name)
            if region.sums_differently([*tree_flatten((node.args, dict(node.kwargs)))[0]]):
                refuse("its gradient of a tensor that is also read elsewhere is a sum")
            call = RegionCall(len(calls), region, block, name, guards, refuse)
            with exported.graph.inserting_before(node):
                anchor = exported.graph.create_node("get_attr", ANCHOR)
            node.target = call
            node.args, node.kwargs = (anchor, tuple(node.args), dict(node.kwargs)), {}
            calls.append(call)
        return calls


def _is_changed(block: nn.Module) -> bool:
    """Whether the traced forward has set an attribute of the block or replaced its parameters
    (``torch.func.functional_call``). The change exists only in the trace, so a separate capture of
    the block would not see it.
    """
    effects = InstructionTranslator.current_tx().output.side_effects
    object_ids = {id(value) for part in block.modules() for value in (part, *vars(part).values())}
    tracked = (effects.id_to_variable.get(key) for key in object_ids)
    return any(variable is not None and effects.is_modified(variable) for variable in tracked)


def _modes() -> Hashable:
    """Grad mode, inference mode and autocast, under which blocks are captured and guards hold."""
    other = accelerator_kind()
    autocast = [
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        for kind in ("cpu", other)
    ]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _first_tensor(tree: Any) -> Tensor:
    return next(leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor))


def _signature(block: nn.Module, leaves: list[Any], spec: TreeSpec) -> Hashable:
    """A key for a call: calls with different keys cannot have the same graph.

    Raises:
        CaptureError: the call takes objects other than plain tensors, numbers and text.
    """
    described = tuple(
        (_sizes(leaf.shape), _sizes(leaf.stride()), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf), repr(leaf))  # not its value: 0.0 equals -0.0
        for leaf in leaves
    )
    if not all(type(leaf) in _LEAF_TYPES for leaf in leaves):
        raise CaptureError(
            "the block takes an argument that is no tensor, number or text, "
            "so that it is captured with the model"
        )
    return type(block), torch.is_grad_enabled(), str(spec), described


def _has_symbols(leaves: list[Any]) -> bool:
    """Whether a tensor has a symbolic size or stride."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = (size for tensor in tensors for size in (*tensor.shape, *tensor.stride()))
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _sizes(sizes: Sequence[int | torch.SymInt]) -> tuple[int | str, ...]:
    """Sizes in a form that can be compared without guards: symbolic sizes are text."""
    return tuple(n if isinstance(n, int) else str(n) for n in sizes)


def _blank(leaf: Any) -> Any:
    """For a fake tensor, a tensor without memory that has its layout, dtype, device,
    ``requires_grad`` and open sizes. Other leaves are unchanged.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    shape, strides = (map(concrete, sizes) for sizes in (leaf.shape, leaf.stride()))
    blank = torch.empty_strided([*shape], [*strides], dtype=leaf.dtype, device=leaf.device)
    blank.untyped_storage().resize_(0)
    leave_open(blank, [at for at, n in enumerate(leaf.shape) if isinstance(n, torch.SymInt)])
    return blank.requires_grad_(leaf.requires_grad)


def _computed(tensor: Tensor, trained: bool) -> Tensor:
    """A fake tensor that autograd treats as computed, not as a leaf, so that in-place operators
    accept it.
    """
    with torch.enable_grad():
        return tensor.requires_grad_().clone() if trained else tensor
