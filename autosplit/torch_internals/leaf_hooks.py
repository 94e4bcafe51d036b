"""Hooks of parameters.

Autograd's graph ends at a node for each parameter, AccumulateGrad, which adds to ``.grad``
(torch/csrc/autograd/functions/accumulate_grad.h) and runs the hooks of the tensor and of the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, is_not
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

_TENSOR_HOOKS = attrgetter("_backward_hooks")


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

    def lookup(self, names: Sequence[str], state: Mapping[str, Tensor]) -> Leaves:
        """The ``Leaves`` of the parameters with these names.

        Args:
            names: names of parameters.
            state: parameters and buffers by name.
        """
        parameters = [*map(state.__getitem__, names)]
        count, first = len(parameters), id(parameters[0]) if parameters else 0
        leaves = self._cache.get((count, first))
        if leaves is None or any(map(is_not, parameters, leaves.parameters)):
            owned_ids = {id(parameter) for parameter in self._owned()}
            for key in [key for key in self._cache if key[0] == count and key[1] not in owned_ids]:
                del self._cache[key]
            leaves = self._cache[count, first] = Leaves(parameters)
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
    return any(map(_TENSOR_HOOKS, parameters))


def has_hooks_of_users(tensor: Tensor) -> bool:
    """Whether a tensor has a hook of ``register_hook`` that is not torch's own.

    Hooks of FSDP do not count: they need to know when a gradient is computed, not its value.
    """
    hooks = (_TENSOR_HOOKS(tensor) or {}).values()
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
    tables = [table for t in tensors for table in (_TENSOR_HOOKS(t), _LATE_HOOKS(t)) if table]
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
