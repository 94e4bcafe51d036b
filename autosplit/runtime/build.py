"""``trace``: capture, passes and compilation of one module for one kind of call; ``SplitOptions``,
how. A first call with effects of its own is made before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autosplit.backends.backend import (
    Backend,
    backend_named,
    check_backend,
    collecting_new_objects_only,
)
from autosplit.device import generators_kept
from autosplit.errors import (
    CaptureError,
    FailingCallError,
    FirstCallError,
    PythonStateError,
    SplitError,
)
from autosplit.passes import CollectiveCosts, Memory, PassError, SplitGraphs, memory_setting, run
from autosplit.text.files import check_folder, writing
from autosplit.torch_internals.distributed import refuse_sharded
from autosplit.torch_internals.dtensor import refuse_unsupported_shardings
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

from .check import checked, plain_call
from .compiled_graph import prepare_joint
from .dtensor_functions import DTensorFunctions
from .functions import SplitFunctions

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture
    from autosplit.sharded import Gathering

# Dynamo's settings and Python's warning filters, both changed while tracing, belong to the
# process: two threads must not trace at once.
_TRACING = threading.RLock()

DUMP_VARIABLE = "AUTOSPLIT_DUMP"

Dimensions: TypeAlias = "dict[int, frozenset[int]]"
"""Place of an input leaf -> its dimensions whose sizes are left open."""

_KINDS = {Tensor, nn.Parameter}


@dataclasses.dataclass(frozen=True)
class SplitOptions:
    """What the passes and the backend are told; ``autosplit.split`` says what each means.

    Attributes:
        backend: how graphs are run.
        memory: what one microbatch holds, a setting or a budget in bytes.
        defer_whole_backward: whether W does the whole backward where no input needs a gradient, see
            ``autosplit.Stage``.
        overlap: what collectives take; None goes by an estimate.

    Raises:
        SplitError: an unknown backend or memory setting; lists the known ones.
    """

    backend: str = "eager"
    memory: str | int = "balanced"
    defer_whole_backward: bool = False
    overlap: CollectiveCosts | None = None

    def __post_init__(self) -> None:
        check_backend(self.backend)
        try:
            memory_setting(self.memory, collectives=self.overlap)
        except PassError as error:
            raise SplitError(str(error)) from None

    @property
    def memory_policy(self) -> Memory:
        """The memory setting as the passes take it."""
        return memory_setting(
            self.memory, defer_whole_backward=self.defer_whole_backward, collectives=self.overlap
        )


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SplitOptions,
    *,
    called: bool = False,
    require_graph: bool = True,
    regions: bool = False,
    gathering: Gathering | None = None,
) -> SplitFunctions:
    """Capture, split and compile a module for inputs like these.

    The forward's Python is not run, unless a call changes Python state or builds submodules, as
    many do the first time only. Such a call is made here, and the generators of random numbers put
    back; or, with ``called`` and where it gives lazy parameters their shape, left to the caller.

    With ``AUTOSPLIT_DUMP=dir`` in the environment every stage of the pass pipeline is
    written below ``dir``, a numbered folder for each traced module.

    Args:
        module: what to trace.
        args: example positional inputs.
        kwargs: example keyword inputs.
        options: how it is split.
        called: whether the inputs are those of a call that is to be run.
        require_graph: whether nothing but a graph will do, and a call may be made for it.
        regions: whether blocks that the module has several of are captured once a kind, and called
            by the graphs, unless a budget is of the whole.
        gathering: gathers the parameters that graphs read, where ``fully_shard`` has sharded them.

    Raises:
        CaptureError: the module cannot be traced.
        FirstCallError: the call is to be run without a graph.
        SplitError: the graph cannot be split, or a memory budget cannot be met.
        ShardedError: FSDP manages the module or a part of it, or a parameter is a DTensor that
            cannot be trained.
        BackendError: the backend cannot compile the graph.
        OutputError: the folder that ``AUTOSPLIT_DUMP`` names cannot be written.
    """
    refuse_sharded(module)
    refuse_unsupported_shardings(module)
    compiler, setting = backend_named(options.backend), options.memory_policy
    compiler.gathering = gathering
    with _TRACING, _undrawn(), collecting_new_objects_only():
        dump = dump_folder(module)
        split = None
        # What waits of each block, where not all may, is told by all of them.
        if regions and not setting.allows_early_weight_grads:
            split = partial(_split_block, compiler, setting, dump)
        traced = _capture(module, args, kwargs, compiler, split, called, require_graph)
        try:
            made = DTensorFunctions if traced.shardings else SplitFunctions
            make = checked(made, partial(plain_call, module, tree_flatten((args, kwargs))[1]))
            functions = make(traced, split_capture(traced, compiler, setting, dump), compiler)
        except PassError as error:
            name = type(module).__name__
            raise SplitError(f"{name} was captured but cannot be split: {error}") from error
        traced.guards.freeze()
        return functions


def _split_block(
    compiler: Backend,
    memory: Memory,
    dump: pathlib.Path | None,
    kind: str,
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Capture, SplitGraphs]:
    """A block of a model, captured and split by itself; dumped into a folder of its kind."""
    from autosplit.capture.joint_graph import capture

    traced = capture(block, args, kwargs, compiler.decompositions)
    graphs = split_capture(traced, compiler, memory, dump and dump / kind)
    traced.guards.freeze()
    return traced, graphs


def split_capture(
    traced: Capture,
    compiler: Backend,
    memory: Memory,
    dump: pathlib.Path | None = None,
) -> SplitGraphs:
    """Split a joint graph, for a backend.

    Raises:
        PassError: it cannot be split.
        BackendError: the backend cannot prepare it.
    """
    prepare_joint(traced.joint, compiler)
    with writing(dump) if dump else contextlib.nullcontext():
        return run(traced.joint, memory=memory, dump=dump)


def _capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: Backend,
    split: Callable[..., tuple[Capture, SplitGraphs]] | None,
    called: bool,
    require_graph: bool,
) -> Capture:
    # Dynamo takes over a second to import; a program that never traces should not pay for it.
    from autosplit.capture.joint_graph import capture
    from autosplit.capture.side_effects import refuse_own_generators

    if is_unshaped(module):
        raise FirstCallError(
            f"{type(module).__name__} has parameters without a shape: call it once before"
        )
    options: dict[str, Any] = {"decompositions": backend.decompositions, "split": split}
    try:
        return capture(module, args, kwargs, **options)
    except PythonStateError as error:
        # Many forwards fill a cache or a setting on their first call only.
        if called:
            refuse_own_generators(module)  # which the next call would find again
            raise FirstCallError(str(error)) from error
        if not require_graph:
            raise
    warm_up(module, args, kwargs)
    return capture(module, args, kwargs, **options)


def warm_up(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the module once, so that it fills caches and settings; restore random generators."""
    with generators_kept():
        _run(module, args, kwargs)


@torch.no_grad()
def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the module on copies of its inputs, and restore its buffers."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    leaves, spec = tree_flatten((args, kwargs))
    copies = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(copies, spec)
    module(*args, **kwargs)
    for name, buffer in module.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])


def _copy(tensor: Tensor) -> Tensor:
    """A copy of an input; zeros for one without memory, which stands for any."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return torch.zeros_like(tensor)
    return tensor.detach().clone()


def is_unshaped(module: nn.Module) -> bool:
    """Whether the first call is to give lazy parameters or buffers (``nn.LazyLinear`` and the like)
    their shape.
    """
    return any(map(is_lazy, (*module.parameters(), *module.buffers())))


@contextlib.contextmanager
def _undrawn() -> Iterator[None]:
    """Restore Python's and NumPy's generators, from which the traced Python may draw."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])


def without_history(
    leaves: Sequence[Any], *, computed: bool = False, varying: Dimensions | None = None
) -> list[Any]:
    """Leaves for tracing: same shapes and ``requires_grad``, no autograd history. One tensor given
    twice stays one: a graph is specialised on which inputs are the same.

    Args:
        leaves: the inputs' leaves; tensors may have no memory.
        computed: whether they stand for what an earlier module hands over: those with a gradient
            are then no leaves of autograd's graph, and each is a tensor of its own.
        varying: dimensions whose sizes tracing is to leave open.

    Raises:
        CaptureError: a tensor is not strided (sparse, for example).
        FailingCallError: a tensor is of a class that torch cannot trace.
    """
    made: dict[int, Tensor] = {}
    found: list[Any] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            key = at if computed else id(leaf)
            if key not in made:
                made[key] = _detached(leaf, computed)
            leaf = made[key]
            if varying and at in varying:
                from autosplit.capture.input_sizes import leave_open

                leave_open(leaf, varying[at])
        found.append(leaf)
    return found


def _detached(tensor: Tensor, computed: bool) -> Tensor:
    if tensor.layout is not torch.strided:
        raise CaptureError(f"an input has layout {tensor.layout}; only strided inputs are split")
    kind = type(tensor)
    if kind not in _KINDS and kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        raise FailingCallError(
            f"an input is a {kind.__name__}, a subclass of Tensor that torch cannot trace; pass "
            "it.as_subclass(torch.Tensor)"
        )
    leaf = tensor.detach().requires_grad_(tensor.requires_grad)
    # Autograd lets a module write into an input that an earlier module computed, never into a
    # leaf: tracing must see the one or the other.
    if tensor.is_leaf and not (computed and tensor.requires_grad):
        return leaf
    with torch.enable_grad():
        result: Tensor = _Computed.apply(leaf)  # type: ignore[no-untyped-call]
    return result


class _Computed(torch.autograd.Function):
    """The same memory as something computed: neither a leaf nor a view of one, into neither of
    which a module may write.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def dump_folder(module: nn.Module) -> pathlib.Path | None:
    """Where ``AUTOSPLIT_DUMP`` has the stages of a graph written; None where it is not set."""
    folder = os.environ.get(DUMP_VARIABLE)
    if not folder:
        return None
    root = pathlib.Path(folder)
    check_folder(root)
    number = len(list(root.iterdir())) if root.exists() else 0
    rank = f"rank{os.environ['RANK']}_" if "RANK" in os.environ else ""
    return root / f"{rank}{number:02d}_{type(module).__name__}"
