"""``trace`` captures, splits and compiles one module for one kind of call, under ``SplitOptions``.

A module whose first call has side effects is called once before its capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autosplit.backends.backend import Backend, backend_named, collecting_new_objects_only
from autosplit.capture.repeated_blocks import spares_tracing
from autosplit.device import generators_kept
from autosplit.errors import (
    CaptureError,
    FailingCallError,
    FirstCallError,
    PythonStateError,
    SplitError,
)
from autosplit.passes import Kind, PassError, SplitGraphs, run
from autosplit.passes.graph import inputs
from autosplit.passes.lowering.codegen import generate
from autosplit.text.files import check_folder, writing
from autosplit.torch_internals.autograd import without_autocast
from autosplit.torch_internals.distributed import refuse_sharded
from autosplit.torch_internals.dtensor import refuse_unsupported_shardings
from autosplit.torch_internals.logging import trace_artifact
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

from .accumulation import Accumulation
from .check import checked, plain_call
from .compiled_graph import prepare_joint
from .dtensor_functions import DTensorFunctions
from .functions import SplitFunctions
from .options import SplitOptions

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture
    from autosplit.gathering import Gathering

# Dynamo's settings and Python's warning filters, both changed while tracing, belong to the
# process: two threads must not trace at once.
_TRACING = threading.RLock()

DUMP_VARIABLE = "AUTOSPLIT_DUMP"

Dimensions: TypeAlias = "dict[int, frozenset[int]]"
"""Position of an input leaf -> its dimensions whose sizes are left open."""

Values: TypeAlias = Literal["none", "constant", "any"]

_KINDS = {Tensor, nn.Parameter}


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SplitOptions,
    *,
    called: bool = False,
    has_run: bool = False,
    require_graph: bool = True,
    regions: bool = False,
    gathering: Gathering | None = None,
    values: Values = "none",
) -> SplitFunctions:
    """Capture, split and compile a module for calls with the structure, shapes and dtypes of these
    inputs.

    Tracing does not run the forward, with one exception. Many forwards change Python state or build
    submodules at their first call only. Such a first call is made before the capture, and the
    random generators are restored. With ``called``, or if the first call gives lazy parameters
    their shapes, the caller must make it: FirstCallError is raised.

    If ``AUTOSPLIT_DUMP=dir`` is set in the environment, the graphs after each pass are written to a
    numbered folder in ``dir`` for each captured module.

    Args:
        module: the module.
        args: example positional inputs.
        kwargs: example keyword inputs.
        options: how the module is split, and how its graphs run.
        called: whether the caller is about to run the module on these inputs.
        has_run: whether the caller has already run the module, because an earlier ``trace`` raised
            FirstCallError.
        require_graph: whether the module must run as a graph, so that a first call may be made
            before the capture.
        regions: whether repeated blocks are captured once for each kind and called by the graphs.
            Ignored if the memory setting computes some weight gradients in I, or if few blocks
            repeat and the backend does not compile.
        gathering: gathers the parameters that graphs read, if ``fully_shard`` has sharded them.
        values: which tensors the forward may set as attributes of its modules in every call;
            ``"constant"`` allows tensors that need no gradient.

    Raises:
        CaptureError: the module cannot be captured.
        FirstCallError: this call must run without a graph.
        SplitError: the graph cannot be split, or a memory budget cannot be met.
        ShardedError: FSDP manages the module or a part of it, or a parameter is a DTensor that
            cannot be trained.
        BackendError: the backend cannot compile the graph.
        OutputError: the folder that ``AUTOSPLIT_DUMP`` names cannot be written.
    """
    refuse_sharded(module)
    refuse_unsupported_shardings(module)
    with _TRACING, _undrawn(), collecting_new_objects_only():
        compiler = backend_named(options.backend, options.mode)
        compiler.gathering = gathering
        dump = dump_folder(module)
        split = None
        # Which weight gradients I computes early depends on all blocks together.
        regions = regions and (compiler.compiles or spares_tracing(module))
        if regions and not options.memory_policy.allows_early_weight_grads:
            split = partial(_split_block, compiler, options, dump)
        # Sharded parameters may have no memory now; then the run before must suffice.
        warms_up = require_graph and (gathering is None or not has_run)
        traced = _capture(module, args, kwargs, compiler, split, called, warms_up, values)
        try:
            functions_class = DTensorFunctions if traced.shardings else SplitFunctions
            spec = tree_flatten((args, kwargs))[1]
            plain = partial(plain_call, module, spec, traced.values)
            make = checked(functions_class, plain)
            graphs = split_capture(traced, compiler, options, dump)
            compiler.asserts_inputs = bool(traced.shardings or traced.sizes or gathering)
            functions = make(traced, graphs, compiler, Accumulation.named(options.accumulation))
        except PassError as error:
            name = type(module).__name__
            raise SplitError(f"{name} was captured but cannot be split: {error}") from error
        traced.guards.freeze()
        return functions


def _split_block(
    compiler: Backend,
    options: SplitOptions,
    dump: pathlib.Path | None,
    kind: str,
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    detached: Collection[str],
) -> tuple[Capture, SplitGraphs]:
    """Capture and split one block of a model. The graphs are dumped into a folder for the kind of
    block.
    """
    from autosplit.capture.joint_graph import capture

    traced = capture(block, args, kwargs, compiler.decompositions, detached=detached)
    graphs = split_capture(traced, compiler, options, dump and dump / kind)
    traced.guards.freeze()
    return traced, graphs


def split_capture(
    traced: Capture,
    compiler: Backend,
    options: SplitOptions,
    dump: pathlib.Path | None = None,
) -> SplitGraphs:
    """Prepare a joint graph for a backend, and split it.

    Raises:
        PassError: the graph cannot be split.
        BackendError: the backend cannot prepare the graph.
    """
    memory = options.memory_policy
    # Recomputing a block's norm would gather the block's weights once more. Compilers choose the
    # strides of a result, and may choose others where they recompute it.
    if compiler.gathering or compiler.compiles:
        memory = dataclasses.replace(memory, recomputes_results=False)
    # The joint graph has its casts already.
    with without_autocast(), writing(dump) if dump else contextlib.nullcontext():
        prepare_joint(traced.joint, compiler)
        graphs = run(traced.joint, passes=options.passes, memory=memory, dump=dump)
    for name, graph in graphs.graphs().items():
        trace_artifact(f"autosplit_{name}", partial(generate, name, graph))
    return graphs


def _capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: Backend,
    split: Callable[..., tuple[Capture, SplitGraphs]] | None,
    called: bool,
    warms_up: bool,
    values: Values,
) -> Capture:
    """Capture a module. If its first call has side effects, capture it after that call. If later
    calls have side effects, too, tensors that the forward sets as attributes become outputs of the
    graph.

    Raises:
        CaptureError: the module cannot be captured.
        FirstCallError: the caller must run this call without a graph.
    """
    # Importing Dynamo takes over a second; a program that never traces should not pay for it.
    from autosplit.capture.joint_graph import capture
    from autosplit.capture.side_effects import refuse_own_generators

    if is_unshaped(module):
        raise FirstCallError(
            f"{type(module).__name__} has lazy parameters without a shape: call it once before "
            "it is split or built as a stage"
        )
    options: dict[str, Any] = {"decompositions": backend.decompositions, "split": split}
    try:
        return capture(module, args, kwargs, **options)
    except PythonStateError as error:
        # Many forwards fill a cache or a setting on their first call only.
        if called:
            refuse_own_generators(module)  # the second call would draw from them, too
            raise FirstCallError(str(error)) from error
        refused = error
        if values == "none" and not warms_up:
            raise
    if warms_up:
        warm_up(module, args, kwargs)
        try:
            return capture(module, args, kwargs, **options)
        except PythonStateError:
            if values == "none":
                raise
    traced = capture(module, args, kwargs, **options, values=True)
    trained = {role.name for role in inputs(traced.joint.graph, Kind.TANGENT)}
    if values == "constant" and any(value.name in trained for value in traced.values):
        raise refused
    return traced


def warm_up(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the module once, so that it fills its caches, and restore the random generators."""
    with generators_kept():
        _run(module, args, kwargs)


@torch.no_grad()
def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the module on copies of these inputs, and restore its buffers."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    leaves, spec = tree_flatten((args, kwargs))
    copies = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(copies, spec)
    module(*args, **kwargs)
    for name, buffer in module.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])


def _copy(tensor: Tensor) -> Tensor:
    """A copy of an input; zeros for a tensor without memory."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return torch.zeros_like(tensor)
    return tensor.detach().clone()


def is_unshaped(module: nn.Module) -> bool:
    """Whether the module has lazy parameters or buffers (``nn.LazyLinear``), which get their shapes
    in the first call.
    """
    return any(map(is_lazy, (*module.parameters(), *module.buffers())))


@contextlib.contextmanager
def _undrawn() -> Iterator[None]:
    """Context that restores the random generators of Python and NumPy at its end, because a traced
    forward may draw from them.
    """
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def without_history(
    leaves: Sequence[Any], *, computed: bool = False, varying: Dimensions | None = None
) -> list[Any]:
    """Return detached leaves for a capture: the same shapes and ``requires_grad``, but no autograd
    history.

    A tensor that occurs as several leaves stays one tensor, because graphs are specialized on which
    leaves are the same tensor.

    Args:
        leaves: the flattened inputs; tensors may have no memory.
        computed: whether the leaves are outputs of an earlier module. Each is then a separate
            tensor, and a tensor that requires a gradient is not a leaf of autograd's graph.
        varying: dimensions whose sizes the capture leaves open.

    Raises:
        CaptureError: a tensor is not strided (sparse, for example).
        FailingCallError: a tensor is of a class that torch cannot trace.
    """
    detached: dict[int, Tensor] = {}
    examples: list[Any] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            key = at if computed else id(leaf)
            if key not in detached:
                detached[key] = _detached(leaf, computed)
            leaf = detached[key]
            if varying and at in varying:
                from autosplit.capture.input_sizes import leave_open

                leave_open(leaf, varying[at])
        examples.append(leaf)
    return examples


def _detached(tensor: Tensor, computed: bool) -> Tensor:
    """One tensor for ``without_history``."""
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"an input has layout {tensor.layout}; only strided inputs are split: pass x.to_dense()"
        )
    kind = type(tensor)
    if kind not in _KINDS and kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        raise FailingCallError(
            f"an input is a {kind.__name__}, a subclass of Tensor that torch cannot trace; pass "
            "x.as_subclass(torch.Tensor)"
        )
    leaf = tensor.detach().requires_grad_(tensor.requires_grad)
    # Autograd lets a module write into an input that an earlier module computed, but not into a
    # leaf. The example must be of the same kind.
    if tensor.is_leaf and not (computed and tensor.requires_grad):
        return leaf
    with torch.enable_grad():
        result: Tensor = _Computed.apply(leaf)  # type: ignore[no-untyped-call]
    return result


class _Computed(torch.autograd.Function):
    """Identity whose result is neither a leaf nor a view of a leaf, so that a module may write into
    it.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def dump_folder(module: nn.Module) -> pathlib.Path | None:
    """The path of a new folder for a module's graphs, inside the folder ``AUTOSPLIT_DUMP``; None if
    the variable is not set.
    """
    folder = os.environ.get(DUMP_VARIABLE)
    if not folder:
        return None
    root = pathlib.Path(folder)
    check_folder(root)
    number = len(list(root.iterdir())) if root.exists() else 0
    rank = f"rank{os.environ['RANK']}_" if "RANK" in os.environ else ""
    return root / f"{rank}{number:02d}_{type(module).__name__}"
