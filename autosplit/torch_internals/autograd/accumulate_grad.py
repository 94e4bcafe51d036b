"""Gradient accumulation into ``.grad``, and the hooks that observe it.

Autograd ends at a node for each parameter, AccumulateGrad, which only adds to ``.grad``
(torch/csrc/autograd/functions/accumulate_grad.h) unless the tensor or that node has
hooks. Where none is to fire, adding here is the same and takes a tenth of the engine's time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter, is_not
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from autosplit.torch_internals.dtensor import is_dtensor, like, local_tensor

T = TypeVar("T")

_TENSOR_HOOKS = attrgetter("_backward_hooks")
_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_NEEDS_GRAD = attrgetter("requires_grad")
_IS_SPARSE = attrgetter("is_sparse")
_IS_LEAF = attrgetter("is_leaf")


class Leaves:
    """Parameters and their hooks, which can be checked cheaply at every step.

    Their nodes are held: a hook that is put on one later is found, and autograd would make
    another node where nobody holds it.

    Attributes:
        parameters: these.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = tuple(parameters)
        # Without any, there is nothing to add.
        self._plain = (
            bool(parameters)
            and len(set(map(id, parameters))) == len(parameters)
            and all(map(_is_plain, parameters))
        )
        own = {id(p): p for p in parameters if p.is_leaf and p.requires_grad}
        self._nodes = [get_gradient_edge(p).node for p in own.values()]
        self._hooks = [hooks for node in self._nodes for hooks in _python_hooks(node)]
        self._checked = -1

    def are(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters."""
        mine = self.parameters
        return len(mine) == len(parameters) and not any(map(is_not, parameters, mine))

    def allows_direct_add(self, *, reduced: bool | None = None) -> bool:
        """Whether adding a gradient to ``.grad`` has the same effects as accumulation by the
        engine without hooks.

        Args:
            reduced: whether data parallelism reduces them; None where that is not known.
        """
        return (
            self._plain
            and all(map(_NEEDS_GRAD, self.parameters))
            and all(map(_IS_LEAF, self.parameters))
            and not torch.is_inference_mode_enabled()
            and not torch.is_anomaly_enabled()
            # Data parallelism hooks into the nodes from C++, which cannot be seen from here.
            and not (_may_be_reduced() if reduced is None else reduced)
        )

    def has_hooks(self) -> bool:
        """Whether one of them, or its autograd node, has a hook."""
        latest = RemovableHandle.next_id  # counts every hook that is put on anything
        if latest != self._checked:
            if any(self._hooks) or has_gradient_hooks(self.parameters):
                return True
            self._checked = latest
        return False


def _may_be_reduced() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def has_tensor_hooks(parameters: Iterable[Tensor]) -> bool:
    """Whether one of them has a hook of ``register_hook``."""
    return any(map(_TENSOR_HOOKS, parameters))


def has_hooks_of_users(tensor: Tensor) -> bool:
    """Whether it has a hook of ``register_hook`` that is not torch's own: those of FSDP ask for the
    moment at which a gradient comes, not for its value.
    """
    hooks = (_TENSOR_HOOKS(tensor) or {}).values()
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)


def has_accumulate_hooks(parameters: Iterable[Tensor]) -> bool:
    """Whether one of them has a hook of ``register_post_accumulate_grad_hook``."""
    return any(map(_LATE_HOOKS, parameters))


def has_gradient_hooks(parameters: Sequence[Tensor]) -> bool:
    """Whether one of them has either kind of hook."""
    return has_tensor_hooks(parameters) or has_accumulate_hooks(parameters)


@contextlib.contextmanager
def hooks_put_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """No hook of these tensors fires, though those of data parallelism do."""
    tables = [t for p in parameters for t in (_TENSOR_HOOKS(p), _LATE_HOOKS(p)) if t]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def add_gradients(
    parameters: Sequence[Tensor], grads: Sequence[Tensor], borrowed: Sequence[bool]
) -> None:
    """Add to every ``.grad`` as AccumulateGrad does; call it without grad mode.

    Args:
        parameters: whose; leaves.
        grads: one for each.
        borrowed: which of them are not tensors of their own, and are copied.
    """
    sums = [parameter.grad for parameter in parameters]
    present = [total for total in sums if total is not None]
    apart = any(map(is_dtensor, grads)) or any(map(_IS_SPARSE, present))
    if len(present) == len(sums) and not apart:
        torch._foreach_add_(present, list(grads))
        return
    for parameter, total, grad, copied in zip(parameters, sums, grads, borrowed, strict=True):
        if total is None:
            parameter.grad = own_gradient(parameter, grad, copied)
        elif total.is_sparse:
            parameter.grad = grad + total
        else:
            total.add_(grad)


def _is_plain(parameter: Tensor) -> bool:
    """Whether it is a leaf whose gradients are dense, in its own layout."""
    own = local_tensor(parameter)
    return (
        (own is not parameter or type(parameter) in (Tensor, torch.nn.Parameter))
        and parameter.is_leaf
        and parameter.requires_grad
        and own.layout is torch.strided
        and torch.empty_like(own, device="meta").stride() == own.stride()
    )


def _python_hooks(node: Node) -> list[dict[int, Any]]:
    """The dictionaries in which hooks before and after the node are kept."""
    handles = [node.register_prehook(_nothing), node.register_hook(_nothing)]
    dictionaries = [cast(dict[int, Any], handle.hooks_dict_ref()) for handle in handles]
    for handle in handles:
        handle.remove()
    return dictionaries


def _nothing(*_: Any) -> None:
    pass


def own_gradient(parameter: Tensor, grad: Tensor, borrowed: bool) -> Tensor:
    """A gradient as ``.grad``: itself where it is not borrowed and has the parameter's strides. Of
    a DTensor, this rank's part; it lies over ranks as before, which need not be as the parameter.
    """
    dtype = getattr(parameter, "grad_dtype", None) or grad.dtype
    if is_dtensor(grad):
        part, own = local_tensor(grad), local_tensor(parameter)
        return like(grad, _owned(own if own.shape == part.shape else part, part, borrowed, dtype))
    return _owned(parameter, grad, borrowed, dtype)


def _owned(layout: Tensor, grad: Tensor, borrowed: bool, dtype: torch.dtype) -> Tensor:
    if borrowed or grad.stride() != layout.stride() or grad.dtype is not dtype:
        return torch.empty_like(layout, dtype=dtype, requires_grad=False).copy_(grad)
    return grad.detach() if grad._base is not None else grad  # a view would keep its base


def memoryless_tensor(kind: type[T], like: Tensor, dtype: torch.dtype) -> T:
    """A tensor of a subclass of Tensor, without memory, in the shape and on the device of another.
    Functions in C that ask for its memory raise a RuntimeError; without being told, they read it
    at address 0.

    Args:
        kind: the subclass.
        like: the other tensor.
        dtype: of the new one.
    """
    make: Any = Tensor._make_wrapper_subclass
    made = make(kind, like.shape, dtype=dtype, device=like.device)
    torch._C._set_throw_on_mutable_data_ptr(made)
    return cast(T, made)


tensor_users = Tensor._use_count  # type: ignore[attr-defined]
"""C++ reference count of a tensor, its Python object included."""

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context in which ``__torch_function__`` of subclasses is not called."""

ZERO_ALL = torch._foreach_zero_


@contextlib.contextmanager
def outside_dispatch() -> Iterator[None]:
    """Context with the dispatch keys of a fresh thread: below ``__torch_dispatch__`` autograd is
    off, whatever ``enable_grad`` says.
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
