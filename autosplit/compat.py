"""torch internals that several parts need, under stable names.

With ``capture/`` and the other ``compat`` files this is the only place that touches torch's private
API; supporting a new torch release means looking here and there, and nowhere else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from operator import is_not
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

__all__ = [
    "StateReader",
    "TreeSpec",
    "asked_by_pipelining",
    "csv_has_send_waits",
    "current_backward",
    "data_parallel",
    "flatten_named",
    "fsdp_part",
    "graph_is_kept",
    "has_saved_tensors_hooks",
    "in_compiler",
    "in_transform",
    "is_exported",
    "is_fsdp_managed",
    "is_gone",
    "register_node",
    "share_state",
    "storage_users",
    "tree_flatten",
    "tree_unflatten",
    "untraced",
    "versions",
    "will_run",
    "without_autocast",
]

OLDEST = (2, 11)
"""Before it, Dynamo does not export a capture together with its guards."""

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""The torch at hand: major and minor version."""

if TORCH < OLDEST:
    raise ImportError(
        f"autosplit needs torch {OLDEST[0]}.{OLDEST[1]} or later and found {torch.__version__}; "
        f"run pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'"
    )

P = ParamSpec("P")
T = TypeVar("T")

without_autocast = torch._C._DisableAutocast
"""Context in which no operator is autocast: for graphs whose casts are operators already."""

graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that is under way has ``retain_graph=True``."""

current_backward = torch._C._current_graph_task_id
"""Number of the backward that is under way on this thread; later ones have higher numbers."""


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: ``torch.compile`` leaves the function and what it calls alone. Costs next to
    nothing outside of it, and does not import it.
    """
    disabled = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def has_saved_tensors_hooks() -> bool:
    """Whether the user has hooks for what autograd saves: offloading, ``checkpoint``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def will_run(node: Node) -> bool:
    """Whether the backward under way comes to a node: ``torch.autograd.grad`` and
    ``backward(inputs=...)`` leave those out that they need not.
    """
    return bool(torch._C._will_engine_execute_node(node))


def in_transform() -> bool:
    """Whether this runs inside a ``torch.func`` transform or forward-mode differentiation."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def asked_by_pipelining() -> bool:
    """Whether a schedule of torch.distributed.pipelining that runs I and W apart is asking this
    thread for input gradients; weights it then looks for in autograd's graph.
    """
    module = sys.modules.get("torch.distributed.pipelining._backward")
    code = getattr(getattr(module, "stage_backward_input", None), "__code__", None)
    frame = sys._getframe() if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def in_compiler() -> bool:
    """Whether this is asked by torch.compile, or by what it traces, while it makes a graph."""
    return TracingContext.try_get() is not None


def is_exported() -> bool:
    """Whether ``torch.export``, ``torch.onnx`` or ``torch.jit.trace`` runs this to record it."""
    if torch._C._get_tracing_state() is not None:
        return True
    # The flag is the process's: another thread may be capturing a model.
    return torch.compiler.is_exporting() and (
        torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
    )


def data_parallel() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward calls this."""
    active: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return active


_FSDP_MARK = "_is_fsdp_managed_module"
"""What FSDP leaves, for Dynamo, on every module that it manages."""


def is_fsdp_managed(module: nn.Module) -> bool:
    """Whether FSDP manages the module itself; cheap enough to be asked at every call."""
    return _FSDP_MARK in module.__dict__


def fsdp_part(module: nn.Module) -> tuple[str, str] | None:
    """Name and class of the first submodule, or the module itself, that FSDP manages: by
    ``fully_shard`` (with any mesh, replicated too) or inside ``FullyShardedDataParallel``.
    """
    library = sys.modules.get("torch.distributed.fsdp")  # nothing can be sharded without it
    if library is None:
        return None
    kinds = (library.FSDPModule, library.FullyShardedDataParallel)
    for name, part in module.named_modules():
        if isinstance(part, kinds) or is_fsdp_managed(part):
            return name, type(part).__name__
    return None


def flatten_named(root: str, tree: Any) -> list[tuple[str, Any]]:
    """Leaves of a pytree with the Python path that reaches each: ``output['logits'][0]``."""
    leaves, _ = tree_flatten_with_path(tree)
    return [(root + "".join(map(_key, path)), leaf) for path, leaf in leaves]


def register_node(
    kind: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
    names: Callable[[Any], Iterable[str]],
) -> None:
    """Make a class a pytree node; ``names`` gives the attribute behind each child."""

    def with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(value)
        keys = [GetAttrKey(name) for name in names(context)]
        return list(zip(keys, children, strict=True)), context

    register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )


def _key(key: Any) -> str:
    if isinstance(key, MappingKey):
        return f"[{key.key!r}]"
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, GetAttrKey):
        return f".{key.name}"
    return f"[{key}]"


def versions(tensors: Iterable[Any]) -> tuple[int, ...]:
    """How often each tensor was written in place, as autograd counts it; 0 for numbers."""
    tensors = tuple(tensors)
    try:
        return tuple([tensor._version for tensor in tensors])
    except (AttributeError, RuntimeError):
        # Some kernels return None where their fake promises a tensor (a workspace not needed);
        # an inference tensor has no version, nor has a number.
        counted = [isinstance(t, torch.Tensor) and not t.is_inference() for t in tensors]
        return tuple([t._version if c else 0 for t, c in zip(tensors, counted, strict=True)])


def is_gone(storage: torch.UntypedStorage) -> Callable[[], bool]:
    """Asks, without keeping the storage, whether no tensor lies in it any more."""
    expired: Callable[[], bool] = StorageWeakRef(storage).expired
    return expired


def storage_users(storage: torch.UntypedStorage) -> tuple[int, int]:
    """How many tensors lie in a storage, views included, and how many names Python has for it.

    Both count what the caller itself has; compare with an answer from the same place.
    """
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


class StateReader:
    """Reads a module's parameters and buffers by name, as they are at the moment of the call.

    Looks each one up where the module keeps it, so that a parameter that was moved or
    replaced since is found, without walking the module tree on every call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._index()

    def _index(self) -> None:
        slots: dict[str, tuple[dict[str, Any], str]] = {}
        children: list[tuple[dict[str, Any], str]] = []
        for prefix, child in self._module.named_modules(remove_duplicate=False):
            modules, *spaces = map(_table, (child._modules, child._parameters, child._buffers))
            children += [(modules, name) for name in modules]
            for space in spaces:
                for name in space:
                    slots[f"{prefix}.{name}" if prefix else name] = (space, name)
        self._names, self._slots, self._children = list(slots), list(slots.values()), children
        self._found = self._present()

    def _present(self) -> list[Any]:
        return [modules.get(name) for modules, name in self._children]

    def __call__(self) -> dict[str, torch.Tensor]:
        if any(map(is_not, self._present(), self._found)):
            self._index()  # a submodule was replaced
        tensors = [space[name] for space, name in self._slots]
        pairs = zip(self._names, tensors, strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}


def _table(names: Any) -> dict[str, Any]:
    """The dictionary in which a module keeps its own; TorchScript keeps them elsewhere."""
    return names if isinstance(names, dict) else dict(names.items())


def share_state(face: nn.Module, module: nn.Module) -> None:
    """Make ``face`` hold the very parameters, buffers and submodules of ``module``.

    The dictionaries are shared, not copied: both have one ``state_dict`` without a prefix,
    and replacing a parameter on either replaces it on both.
    """
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        face.__dict__[name] = module.__dict__[name]
    face.training = module.training


def csv_has_send_waits() -> bool:
    """Whether a schedule that torch reads must say where sends are waited for, as from 2.15 on."""
    # Here, as importing autosplit imports nothing distributed.
    from torch.distributed.pipelining import schedules

    return hasattr(schedules, "WAIT_SEND_F")
