"""Autograd's engine: the running backward, hooks of parameters, and the transforms and compilers
under which a call runs (``torch.func``, torch.compile, torch.export, torch.jit).

Autograd's graph ends at a node for each parameter, AccumulateGrad, which adds to ``.grad``
(torch/csrc/autograd/functions/accumulate_grad.h) and runs the hooks of the tensor and of the node.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter, is_not
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

without_autocast = torch._C._DisableAutocast
"""Context that disables autocast, for graphs that already have casts as operators."""

is_autocast = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device."""


class WithoutAutograd:
    """Context without grad mode and without autocast. It takes a third of the time of torch's own
    contexts, which matters because every call of a stage enters it.
    """

    def __enter__(self) -> None:
        self._grad_mode = torch.is_grad_enabled()
        self._autocast = without_autocast() if is_autocast() else None
        torch._C._set_grad_enabled(False)
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(*error)
        torch._C._set_grad_enabled(self._grad_mode)


graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward has ``retain_graph=True``."""

current_backward = torch._C._current_graph_task_id
"""Number of the running backward of this thread, or -1; later backwards have higher numbers."""


def at_end_of_backward(function: Callable[[], object]) -> None:
    """Call a function at the end of the running backward, before ``backward()`` returns.

    Without a running backward, call it now.
    """
    if current_backward() < 0:
        function()
    else:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(function)


def has_saved_tensors_hooks() -> bool:
    """Whether saved-tensor hooks are set, as by ``torch.utils.checkpoint`` or for offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def will_run(node: Node) -> bool:
    """Whether the running backward visits a node.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` skip nodes that they do not need.
    """
    return bool(torch._C._will_engine_execute_node(node))


def is_requested(node: Node) -> bool:
    """Whether the running backward computes a leaf's gradient, to accumulate or to return it."""
    try:
        return will_run(node)
    except RuntimeError:  # raised for the inputs of torch.autograd.grad
        return True


def in_transform() -> bool:
    """Whether a ``torch.func`` transform or forward-mode differentiation is active."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def direct_apply(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``kind.apply`` without its check for ``torch.func`` transforms.

    The caller must know that no transform is active.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, kind).apply  # type: ignore[misc]
    return apply


def call_backward_directly(kind: type[torch.autograd.Function]) -> None:
    """Make autograd's engine call ``kind.backward`` itself. Otherwise a function of torch looks it
    up at every call.
    """
    kind._backward_cls.apply = kind.backward  # type: ignore[attr-defined]


P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator that keeps ``torch.compile`` from tracing the function and its callees.

    It costs almost nothing outside of ``torch.compile``, and does not import Dynamo.
    """
    disabled = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs or traces the running backward."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def in_compiler() -> bool:
    """Whether torch.compile is tracing. The answer holds in Dynamo's code and in traced code."""
    return TracingContext.try_get() is not None


def is_exported() -> bool:
    """Whether ``torch.export``, ``torch.onnx`` or ``torch.jit.trace`` is recording this call."""
    if torch._C._get_tracing_state() is not None:
        return True
    # The flag is global, and another thread may be exporting. ``is_exporting()`` cannot be used:
    # in torch 2.11 it is always True under Dynamo.
    return torch.compiler._is_exporting_flag and (
        torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
    )


def checks_nan() -> bool:
    """Whether ``torch.autograd.detect_anomaly()`` is on, with its check of gradients."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def memoryless_tensor(kind: type[T], like: Tensor, dtype: torch.dtype) -> T:
    """A tensor without memory, of a subclass of Tensor.

    C functions that access its memory raise a RuntimeError, instead of reading address 0.

    Args:
        kind: the subclass.
        like: a tensor with the same shape and device.
        dtype: the dtype of the new tensor.
    """
    make: Any = Tensor._make_wrapper_subclass
    wrapper = make(kind, like.shape, dtype=dtype, device=like.device)
    torch._C._set_throw_on_mutable_data_ptr(wrapper)
    return cast(T, wrapper)


without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which functions of tensors call no ``__torch_function__`` of subclasses."""


@contextlib.contextmanager
def outside_dispatch() -> Iterator[None]:
    """Context with the dispatch keys of a fresh thread.

    Inside ``__torch_dispatch__``, autograd is off, and ``enable_grad`` cannot enable it.
    """
    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE):
        yield


def _dispatch_outside() -> tuple[Any, Any]:
    """Dispatch keys that a fresh thread includes and excludes."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(
            lambda: (
                torch._C._dispatch_tls_local_include_set(),
                torch._C._dispatch_tls_local_exclude_set(),
            )
        ).result()


_OUTSIDE = _dispatch_outside()


_IS_LEAF = attrgetter("is_leaf")
TENSOR_HOOKS = attrgetter("_backward_hooks")
"""Reads the hooks of ``register_hook`` of a tensor; None if it never had any."""
_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


class Leaves:
    """Parameters with a check for hooks that is cheap enough for every step.

    ``Leaves`` keep references to the parameters' autograd nodes, to find hooks that are registered
    on a node later. Without a reference, autograd would free the node and create another.

    Args:
        parameters: the parameters.

    Attributes:
        parameters: as passed.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = tuple(parameters)
        self._nodes = nodes_of_leaves(self.parameters)
        self._hooks = [hooks for node in self._nodes for hooks in _python_hooks(node)]
        self._checked = -1

    @functools.cached_property
    def are_leaves(self) -> bool:
        """Whether all parameters are leaves of autograd's graph."""
        return all(map(_IS_LEAF, self.parameters))

    def has_hooks(self) -> bool:
        """Whether a parameter or its autograd node has a hook."""
        latest = RemovableHandle.next_id  # counts every registered hook of the process
        if latest != self._checked:
            if any(self._hooks) or has_gradient_hooks(self.parameters):
                return True
            self._checked = latest
        return False


class LeavesCache:
    """A cache of ``Leaves`` by the number and the first of the parameters.

    Graphs of a module mostly share their parameters. Of parameter lists with equal length, only the
    latest is kept, unless its parameters belong to the module. ``Leaves`` refer to autograd's
    nodes, so parameters must not refer to this cache: the cycle would never be freed.

    Args:
        owned: returns the parameters of the module.
    """

    def __init__(self, owned: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._owned = owned
        self._cache: dict[tuple[int, int], Leaves] = {}
        self._latest: tuple[Sequence[str], Mapping[str, Tensor], Leaves] | None = None

    def lookup(self, names: Sequence[str], state: Mapping[str, Tensor]) -> Leaves:
        """The ``Leaves`` of the parameters with these names.

        Args:
            names: names of parameters.
            state: parameters and buffers by name.
        """
        latest = self._latest
        if latest is not None and names is latest[0] and state is latest[1]:
            return latest[2]
        parameters = [*map(state.__getitem__, names)]
        count, first = len(parameters), id(parameters[0]) if parameters else 0
        leaves = self._cache.get((count, first))
        if leaves is None or any(map(is_not, parameters, leaves.parameters)):
            owned_ids = {id(parameter) for parameter in self._owned()}
            for key in [key for key in self._cache if key[0] == count and key[1] not in owned_ids]:
                del self._cache[key]
            leaves = self._cache[count, first] = Leaves(parameters)
        self._latest = names, state, leaves
        return leaves


class UncachedLeaves(LeavesCache):
    """Leaves that keep no references to parameters between calls.

    Hooks on nodes are searched only if any hook was registered since the last search.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ids: list[int] = []
        self._checked = [-1]

    def lookup(self, names: Sequence[str], state: Mapping[str, Tensor]) -> Leaves:
        return self.among([*map(state.__getitem__, names)])

    def among(self, parameters: Sequence[Tensor]) -> Leaves:
        """The ``Leaves`` of these parameters."""
        ids = [*map(id, parameters)]
        if ids != self._ids:
            self._ids, self._checked = ids, [-1]
        return _TransientLeaves(parameters, self._checked)


class _TransientLeaves(Leaves):
    """Leaves without references to autograd's nodes.

    Args:
        parameters: the parameters.
        checked: a list of one number that calls share: how many hooks had been registered at the
            last search that found none.
    """

    def __init__(self, parameters: Sequence[Tensor], checked: list[int]) -> None:
        self.parameters, self._seen = tuple(parameters), checked

    def has_hooks(self) -> bool:
        if [RemovableHandle.next_id] != self._seen:
            if has_gradient_hooks(self.parameters) or any(node_hooks(self.parameters)):
                return True
            self._seen[0] = RemovableHandle.next_id  # looking at nodes counts, too
        return False


def has_tensor_hooks(parameters: Iterable[Tensor]) -> bool:
    """Whether a parameter has a hook of ``register_hook``."""
    return any(map(TENSOR_HOOKS, parameters))


def has_hooks_of_users(tensor: Tensor) -> bool:
    """Whether a tensor has a hook of ``register_hook`` that is not torch's own.

    Hooks of FSDP do not count: they need to know when a gradient is computed, not its value.
    """
    hooks = (TENSOR_HOOKS(tensor) or {}).values()
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)


def has_accumulate_hooks(parameters: Iterable[Tensor]) -> bool:
    """Whether a parameter has a hook of ``register_post_accumulate_grad_hook``."""
    return any(map(_LATE_HOOKS, parameters))


def waits_for_gradient(parameter: Tensor) -> bool:
    """Whether the parameter has a hook of ``register_post_accumulate_grad_hook`` or on its autograd
    node.
    """
    return has_accumulate_hooks([parameter]) or any(node_hooks([parameter]))


def call_accumulate_hooks(parameters: Iterable[Tensor]) -> None:
    """Call the hooks of ``register_post_accumulate_grad_hook`` and the hooks on AccumulateGrad
    nodes. Each is called once, with the parameter's whole gradient.
    """
    with torch.no_grad():
        for parameter in {id(tensor): tensor for tensor in parameters}.values():
            prehooks, posthooks = node_hooks([parameter]) or ({}, {})
            for hook in [*prehooks.values()]:
                if (replaced := hook((parameter.grad,))) is not None:
                    (parameter.grad,) = replaced
            gradient = parameter.grad
            for hook in [*(_LATE_HOOKS(parameter) or {}).values()]:
                hook(parameter)
            for hook in [*posthooks.values()]:
                hook((), (gradient,))


def has_gradient_hooks(parameters: Sequence[Tensor]) -> bool:
    """Whether a parameter has a hook of ``register_hook`` or of
    ``register_post_accumulate_grad_hook``.
    """
    return has_tensor_hooks(parameters) or has_accumulate_hooks(parameters)


def hook_tables(tensors: Sequence[Tensor]) -> list[dict[int, Any]]:
    """The dictionaries of hooks on tensors and on their autograd nodes, without empty
    dictionaries.
    """
    tables = [table for t in tensors for table in (TENSOR_HOOKS(t), _LATE_HOOKS(t)) if table]
    return [*tables, *filter(None, node_hooks(tensors))]


@contextlib.contextmanager
def without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Context in which hooks of tensors and of their autograd nodes are disabled, except hooks of
    data parallelism.
    """
    tables = hook_tables([*parameters])
    contents = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, contents, strict=True):
            table.update(hooks)


class _Visit(torch.autograd.Function):
    """A function whose backward makes the engine visit the nodes of leaves, without gradients for
    them.
    """

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        ctx.count = len(leaves)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None,) * ctx.count


def visit_leaves(leaves: Mapping[int, Tensor]) -> None:
    """Make the engine visit the nodes of leaves that require a gradient.

    Hooks of data parallelism fire, the user's do not.
    """
    trainable = [leaf for leaf in leaves.values() if leaf.requires_grad]
    if trainable:
        with torch.inference_mode(False), torch.enable_grad(), without_hooks(trainable):
            _Visit.apply(*trainable).backward()  # type: ignore[no-untyped-call]


def nodes_of_leaves(tensors: Iterable[Tensor]) -> list[Node]:
    """AccumulateGrad nodes of the leaves that require a gradient."""
    leaves = {id(tensor): tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
    return [get_gradient_edge(leaf).node for leaf in leaves.values()]


def leaves_before(nodes: Iterable[Node | None]) -> list[Tensor]:
    """The leaves from which autograd's nodes have been computed, or which are their own leaves."""
    leaves, seen = list[Tensor](), set[Node]()
    pending: list[Any] = [*nodes]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        pending += [following for following, _ in node.next_functions]
    return leaves


_MARK = "autosplit_node"


def node_hooks(tensors: Sequence[Tensor]) -> list[dict[int, Any]]:
    """The dictionaries of hooks on AccumulateGrad nodes of leaves.

    A node without references is freed, and a new node has no hooks. Reading a node's hooks
    registers a hook, which raises torch's count of hooks. So each node is marked first, and only
    nodes that still have the mark are read.
    """
    for metadata in map(_metadata, nodes_of_leaves(tensors)):
        metadata[_MARK] = True
    survivors = [node for node in nodes_of_leaves(tensors) if _MARK in _metadata(node)]
    return [hooks for node in survivors for hooks in _python_hooks(node)]


def _metadata(node: Node) -> dict[str, Any]:
    return cast(dict[str, Any], node.metadata)  # a property, whatever the stub says


def _python_hooks(node: Node) -> list[dict[int, Any]]:
    """The dictionaries in which an autograd node keeps its pre-hooks and its hooks."""
    handles = [node.register_prehook(_nothing), node.register_hook(_nothing)]
    dictionaries = [cast(dict[int, Any], handle.hooks_dict_ref()) for handle in handles]
    for handle in handles:
        handle.remove()
    return dictionaries


def _nothing(*_: Any) -> None:
    pass
