"""Hooks of ``torch.autograd.graph.register_multi_grad_hook``, which wait for several gradients.

torch registers one hook on each tensor of the group. All hooks of a group share closure variables,
and count the gradients of each backward there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType
from typing import Any

import torch.autograd.graph
from torch import Tensor
from torch.autograd.graph import Node

from .autograd import at_end_of_backward, current_backward, hook_tables


@dataclasses.dataclass(frozen=True)
class GroupHook:
    """One tensor's hook of a multi-gradient hook, with the variables that all hooks of the group
    share.

    Attributes:
        key: a number for the group of tensors, different for each group.
        nodes: autograd's nodes of all tensors of the group; None with ``mode="any"``, which does
            not keep them.
        ran: with ``mode="any"``, maps the number of a backward to whether it has called the user's
            function.
        function: the closure cell of the user's function; None with ``mode="any"``.
    """

    key: int
    nodes: Sequence[Node] | None
    ran: dict[int, bool]
    function: CellType | None = None


def group_hooks(tensor: Tensor) -> list[GroupHook]:
    """Return the hooks of ``torch.autograd.graph.register_multi_grad_hook`` on a tensor."""
    hooks: dict[int, Any] = tensor._backward_hooks or {}
    return [group for hook in hooks.values() if (group := _group_hook(hook)) is not None]


def _group_hook(hook: Any) -> GroupHook | None:
    if getattr(hook, "__globals__", None) is not vars(torch.autograd.graph):
        return None
    cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    shared = dict(cells)
    if "grad_fns" in shared:
        nodes = shared["grad_fns"].cell_contents
        return GroupHook(id(nodes), nodes, {}, shared["fn"])
    if "ran_hook" in shared:
        ran = shared["ran_hook"].cell_contents
        return GroupHook(id(ran), None, ran)
    return None


class MutedHooks:
    """Suppresses a parameter's hooks in the running backward, and catches the parameter's gradient.

    Autograd's engine adds zeros to ``.grad`` in place of the gradient. Later backwards call the
    hooks, even if this backward fails before ``restore``.

    Args:
        parameter: a leaf.

    Attributes:
        parameter: as passed.
        gradient: the gradient that the engine passed to the parameter; None if there was none.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.gradient = parameter, None
        self._backward, self._had_grad = current_backward(), True
        self._muted = [
            (table, key, hook, self._mute(hook))
            for table in hook_tables([parameter])
            for key, hook in table.items()
        ]
        for table, key, _, muted in self._muted:
            table[key] = muted
        register: Any = parameter.register_hook
        self._handle = register(self._take)

    def _mute(self, hook: Any) -> Any:
        def muted(*arguments: Any) -> Any:
            return None if current_backward() == self._backward else hook(*arguments)

        return muted

    def _take(self, gradient: Any) -> Tensor | None:
        if current_backward() != self._backward:  # that backward failed
            self._handle.remove()
            return None
        if gradient is None:
            return None
        self.gradient, self._had_grad = gradient, self.parameter.grad is not None
        return torch.zeros_like(gradient)

    def restore(self) -> None:
        """Restore the hooks, and the value that ``.grad`` had before."""
        self._handle.remove()
        for table, key, hook, muted in self._muted:
            if table.get(key) is muted:  # else a hook has removed it
                table[key] = hook
        if not self._had_grad:
            self.parameter.grad = None


class HooksOfGradients:
    """Calls a tensor's hooks in the running backward only if the tensor gets a gradient.

    The engine visits all arguments of an autograd function, and calls the hooks of an argument
    without a gradient with None. Hooks that wait for all gradients of a group must be called, since
    they count the visits.

    Args:
        tensor: an argument of the function whose backward is running, or a leaf before it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._backward, self._has_gradient = current_backward(), False
        is_trained = tensor.requires_grad
        tensor.requires_grad_()  # torch hides the node of a frozen leaf, whose hooks run, too
        self._limit_all(tensor)
        tensor.requires_grad_(is_trained)

    def _limit_all(self, tensor: Tensor) -> None:
        self._limited = [
            (table, key, hook, self._limit(hook))
            for table in hook_tables([tensor])
            for key, hook in table.items()
            if not _waits_for_all(hook)
        ]
        # A second call in this backward may have the same parameter.
        if not self._limited or any(self._is_repeated(hook) for _, _, hook, _ in self._limited):
            return
        register: Any = tensor.register_hook
        self._handle = register(self._note)
        for table, key, _, limited in self._limited:
            del table[key]  # the hook moves behind ``_note``
            table[key] = limited
        # The callback of a callback runs after ``MutedHooks.restore``.
        at_end_of_backward(partial(at_end_of_backward, self._remove))

    def _is_repeated(self, hook: Any) -> bool:
        """Whether ``hook`` is the ``_note`` of another instance in this backward."""
        instance = getattr(hook, "__self__", None)
        return isinstance(instance, HooksOfGradients) and instance._backward == self._backward

    def _note(self, gradient: Tensor | None) -> None:
        if current_backward() == self._backward:
            self._has_gradient = gradient is not None
        else:  # that backward failed
            self._remove()

    def _limit(self, hook: Any) -> Any:
        def limited(*arguments: Any) -> Any:
            runs = self._has_gradient or current_backward() != self._backward
            return hook(*arguments) if runs else None

        return limited

    def _remove(self) -> None:
        """Restore the hooks."""
        self._handle.remove()
        for table, key, hook, limited in self._limited:
            if table.get(key) is limited:  # else a hook has removed it
                table[key] = hook


def _waits_for_all(hook: Any) -> bool:
    """Whether a hook waits for all gradients of a group. From then on, the user's function of the
    group is called only if one of them exists.
    """
    group = _group_hook(hook)
    if group is None or group.function is None:
        return False
    if not isinstance(group.function.cell_contents, _OfGradients):
        group.function.cell_contents = _OfGradients(group.function.cell_contents)
    return True


@dataclasses.dataclass(frozen=True)
class _OfGradients:
    """A user's function that is not called if no gradient exists."""

    function: Callable[[Sequence[Tensor | None]], None]

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        if any(gradient is not None for gradient in gradients):
            self.function(gradients)
