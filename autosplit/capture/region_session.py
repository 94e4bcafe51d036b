"""``RegionSession``: a capture of a model in which repeated blocks are opaque calls for Dynamo.

Blocks that cannot be called as separate graphs are refused and captured with their model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import UnspecializedNNModuleVariable, VariableTracker
from torch._dynamo.variables.nn_module import record_nn_module_stack
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from autosplit.capture.guards import BlockGuards, Guards
from autosplit.capture.input_sizes import leave_open
from autosplit.capture.repeated_blocks import (
    has_plain_forward,
    look_of,
    repeated_blocks,
    spares_tracing,
)
from autosplit.capture.workarounds.dynamo import function_modes_of_the_call
from autosplit.capture.workarounds.key_value_cache import cache_argument, caching
from autosplit.device import accelerator_kind
from autosplit.errors import CaptureError, PythonStateError
from autosplit.passes.graph import concrete
from autosplit.torch_internals.dynamo import traced_value
from autosplit.torch_internals.patches import patched
from autosplit.torch_internals.pytree import TreeSpec, tree_flatten, tree_unflatten

SWITCH = "AUTOSPLIT_REGIONS"

_ATTEMPTS = 4  # captures around blocks, each without the blocks refused so far


def captures_blocks() -> bool:
    """Whether blocks are captured separately; ``AUTOSPLIT_REGIONS=0`` turns that off."""
    return os.environ.get(SWITCH) != "0"


def is_plain(spec: Any) -> bool:
    """Whether results have a structure that Dynamo accepts from an operator."""
    return spec.is_leaf() or (spec.type in (tuple, list) and all(map(is_plain, spec.children())))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CapturedBlock:
    """The graphs of one kind of block for one kind of call.

    Attributes:
        args: positional example inputs of the capture; tensors without memory.
        kwargs: keyword example inputs of the capture; tensors without memory.
        guards: conditions under which the graphs are valid for a block.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    guards: Guards

    def fake_result(self, leaves: list[Any]) -> Any:
        """A new result of a call, of fake tensors; ``leaves`` are the call's inputs."""
        raise NotImplementedError


R = TypeVar("R", bound=CapturedBlock)
T = TypeVar("T")

CaptureBlock: TypeAlias = (
    "Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], list[Any], frozenset[str]], R]"
)
"""``capture_block(kind, block, args, kwargs, leaves, detached)`` captures a block for one of its
calls. ``kind`` is the name of the block's kind, ``leaves`` are the fake inputs of the call,
``detached`` are the paths of results without a gradient.
"""

_LEAF_TYPES = {FakeTensor, Tensor, nn.Parameter, int, float, bool, str, type(None)}


class RegionRefusedError(Unsupported):
    """A block cannot be captured by itself. Dynamo passes such errors on as they are."""


class RegionSession(Generic[R]):
    """One capture of a model in which Dynamo does not trace into repeated blocks.

    Args:
        model: the model that is captured.
        capture_block: captures a block for one of its calls.
        refused: maps the name of a block that is captured with the model to the reason; the session
            adds entries.
        detached: maps the name of a block to the paths of its results that get no gradient; the
            session adds entries.
        regions: maps a call's signature to the regions captured for it; the session adds entries.
            Sessions of one model share it, so that a later one captures no kind of block again.

    Attributes:
        detached: as passed.
        blocks: the blocks that Dynamo does not trace into, by name.
        is_outdated: whether the session's result must be dropped: a block was refused after
            Dynamo's trace, or the session has added to ``detached`` while sizes are symbolic.
        has_detached: whether the session has added to ``detached`` since blocks were bound.
    """

    def __init__(
        self,
        model: nn.Module,
        capture_block: CaptureBlock[R],
        refused: dict[str, str],
        detached: dict[str, frozenset[str]],
        regions: dict[Hashable, list[R]],
    ) -> None:
        self.model = model
        self._thread = threading.get_ident()
        self._modes = _modes()
        self._capture_block = capture_block
        self.refused = refused
        self.is_outdated = self.has_detached = False
        self.detached = detached
        self._regions = regions
        self._symbols = object()  # part of a signature whose sizes are symbols of this trace
        # The key is the first tensor that a call returns.
        self._matches: dict[Tensor, tuple[R, BlockGuards]] = {}
        self._block_by_operator: dict[Any, tuple[str, nn.Module]] = {}
        self.blocks = {
            n: b
            for n, b in repeated_blocks(model).items()
            if n not in refused and has_plain_forward(b)
        }
        # The key is the ``id`` of a block whose calls are not traced at present.
        self._stand_ins = {id(b): self._stand_in(n, b) for n, b in self.blocks.items()}

    def __bool__(self) -> bool:
        return bool(self.blocks)

    @property
    def regions(self) -> list[R]:
        """Kinds of blocks, in order of their first calls."""
        return [region for regions in self._regions.values() for region in regions]

    @contextlib.contextmanager
    def opaque(self) -> Iterator[None]:
        """Context in which calls of the blocks are operators that Dynamo does not trace into."""
        original: Any = UnspecializedNNModuleVariable.call_function

        def trace_call(module: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            """Trace the call of a module; a block's stand-in is called without ``__call__``. The
            call of a block that cannot be captured by itself is traced with the model. The trace
            ends in an error if the other blocks are too few.
            """
            stand_in = self._stand_ins.get(id(module.value))
            # Another thread may trace a module of the model meanwhile.
            if stand_in is None or not module.source or threading.get_ident() != self._thread:
                return original(module, tx, args, kwargs)
            calls, module_calls = len(self._matches), dict(tx.num_calls)
            key, source = str(id(module.value)), module.get_nn_module_stack_source()
            try:
                with record_nn_module_stack(key, source, tx, module.value):
                    result = VariableTracker.build(tx, stand_in).call_function(tx, args, kwargs)
            except Unsupported as error:
                if len(self._matches) > calls:  # the stand-in failed after its operator
                    raise
                self._add_refused(module.value, str(error))
                if calls and not self._spares_tracing():
                    raise  # a capture of the whole model costs less
                self._erase_failed_call(tx.output)
                tx.num_calls.clear()
                tx.num_calls.update(module_calls)
                return original(module, tx, args, kwargs)
            # The block's own guards check this object, whatever has its place in the model.
            install_guard(module.source.make_guard(GuardBuilder.ID_MATCH))
            return result

        with patched(UnspecializedNNModuleVariable, "call_function", trace_call):
            yield

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

        def call_block(*args: Any, **kwargs: Any) -> Any:
            return session._call_block(name, block_ref(), args, kwargs)

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
            raise RegionRefusedError(f"{name}: {error}") from error
        result = region.fake_result(leaves)
        self._matches[_first_tensor(result)] = match
        return result

    def _spares_tracing(self) -> bool:
        """Whether the blocks that are not refused are worth captures of their own."""
        return spares_tracing(
            self.model, [block for name, block in self.blocks.items() if name not in self.refused]
        )

    def _erase_failed_call(self, output: Any) -> None:
        """Erase from Dynamo's graph the call of a block that raised, if it came that far."""
        last: Any = next(iter(reversed(output.graph.nodes)), None)
        has_failed = last is not None and "example_value" not in last.meta
        if has_failed and last.target in self._block_by_operator:
            output.remove_node(last)

    def _add_refused(self, block: nn.Module, reason: str) -> None:
        """Let later calls of a block, and of all blocks that look like it, be traced with the
        model.
        """
        look = look_of(block)
        for name, other in self.blocks.items():
            if look_of(other) == look:
                self.refused[name] = reason
                self._stand_ins.pop(id(other), None)

    def record_refusal(self, name: str, reason: str) -> None:
        """Refuse a block after Dynamo's trace, so that Dynamo must trace the model again."""
        self.is_outdated = True
        self._add_refused(self.blocks[name], reason)

    def detach(self, name: str, path: str) -> None:
        """Let later captures of a block leave out the gradient of a result."""
        self.has_detached = True
        self.detached[name] = self.detached.get(name, frozenset()) | {path}

    def match_detached(self, name: str, region: R) -> tuple[R, BlockGuards]:
        """Return (region, the block's guards) for a call that an earlier region fitted. The
        returned region leaves out the gradients that nothing needs.
        """
        leaves, spec = tree_flatten((region.args, region.kwargs))
        with self.opaque():
            return self._match(name, self.blocks[name], leaves, spec)

    def _match(
        self, name: str, block: nn.Module, leaves: list[Any], spec: TreeSpec
    ) -> tuple[R, BlockGuards]:
        """Return (region, the block's guards) for a block's call. The region is an existing one if
        its guards hold for the block, else a new one.
        """
        signature: Hashable = _signature(block, leaves, spec), self.detached.get(name)
        if _has_symbols(leaves):  # another trace may give these names to other sizes
            signature = signature, self._symbols
        traced = id(self.blocks[name])
        stand_in = self._stand_ins.pop(traced)
        try:
            for region in self._regions.get(signature, ()):
                guards = BlockGuards(region.guards, block, region.args, region.kwargs)
                if guards.hold() and region.guards.has_old_forwards:
                    return region, guards
            return self._new(name, block, signature, leaves, spec)
        finally:
            self._stand_ins[traced] = stand_in

    def _new(
        self,
        name: str,
        block: nn.Module,
        signature: Hashable,
        leaves: list[Any],
        spec: TreeSpec,
    ) -> tuple[R, BlockGuards]:
        args, kwargs = tree_unflatten([*map(_blank, leaves)], spec)
        kind = f"{type(self.blocks[name]).__name__}_{len(self.regions)}"
        detached = self.detached.get(name, frozenset())
        region = self._capture_block(kind, block, args, kwargs, leaves, detached)
        self._regions.setdefault(signature, []).append(region)
        return region, BlockGuards(region.guards, block, args, kwargs)

    def called_blocks(
        self, exported: fx.GraphModule
    ) -> list[tuple[fx.Node, str, nn.Module, R, BlockGuards]]:
        """The calls of blocks in the captured graph: (node, name of the block, the block, its kind,
        its guards).

        Raises:
            RegionRefusedError: a block is called in the body of a higher-order operator.
        """
        graphs = (graph for graph in exported.modules() if isinstance(graph, fx.GraphModule))
        nested = [node for graph in graphs if graph is not exported for node in graph.graph.nodes]
        for node in nested:
            if node.target in self._block_by_operator:
                name, _ = self._block_by_operator[node.target]
                self.record_refusal(name, "it is called in the body of a higher-order operator")
                raise RegionRefusedError(name)
        return [
            (node, *self._block_by_operator[node.target], *self._matches[_first_tensor(value)])
            for node in exported.graph.nodes
            if node.target in self._block_by_operator
            for value in [traced_value(node)]
        ]


def capture_around_blocks(
    model: nn.Module,
    capture_block: CaptureBlock[R],
    capture: Callable[[RegionSession[R]], T | None],
) -> T | None:
    """Capture a model, and its repeated blocks once for each kind; None if no block can be captured
    separately.

    Args:
        model: the model.
        capture_block: captures a block for one of its calls.
        capture: captures the model in a session.

    Raises:
        PythonStateError: a capture of the whole model would fail as well.
    """
    refused: dict[str, str] = {}
    detached: dict[str, frozenset[str]] = {}
    regions: dict[Hashable, list[R]] = {}
    for _ in range(_ATTEMPTS if captures_blocks() else 0):
        session = RegionSession(model, capture_block, refused, detached, regions)
        if not session:
            return None
        try:
            captured = capture(session)
            if not session.is_outdated:
                return captured
        except PythonStateError:
            raise
        except Exception:
            if not session.is_outdated:
                return None
    return None


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
