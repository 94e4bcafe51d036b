"""Call hooks that were registered on parameters between the forward and the backward.

Autograd's graph has edges to the sentinel parameters only. The engine calls the sentinels' hooks in
the running backward. Hooks of other parameters are called in a second run of the engine at the end
of the backward. A hook that waits for several gradients counts them within one run. So all
parameters of such a hook are left to the second run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import (
    Leaves,
    at_end_of_backward,
    current_backward,
    nodes_of_leaves,
    will_run,
)
from autosplit.torch_internals.group_hooks import GroupHook, MutedHooks, group_hooks

from .delivery import weight_gradients
from .pending import PendingQueue, PendingWork


def weights_for_late_hooks(
    queue: PendingQueue, work: PendingWork, sentinel_parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Run all pending work, then W of this backward, because hooks were registered between forward
    and backward.

    The engine calls the hooks of ``sentinel_parameters`` now, except hooks that wait for other
    parameters too. All other hooks are called at the end of the backward, with a parameter's
    gradient summed over all calls of graphs in this backward.

    Returns:
        the gradients of ``sentinel_parameters``.

    Raises:
        SplitError: a hook would be called more than once.
    """
    queue.compute()
    names = work.graph.parameter_names
    parameters = [work.state[name] for name in names]
    named = zip(names, parameters, weight_gradients(work), strict=True)
    grads = {id(p): (name, p, grad) for name, p, grad in named}
    sentinel_grads = [grads.pop(id(parameter))[2] for parameter in sentinel_parameters]
    groups = _groups({name: parameter for name, parameter, _ in grads.values()}, parameters)
    muted = [
        MutedHooks(sentinel)
        for sentinel in sentinel_parameters
        if any(group.key in groups for group in group_hooks(sentinel))
    ]
    added = [parameter for entry in grads.values() if (parameter := _add_late(*entry)) is not None]
    at_end_of_backward(partial(_deliver_late, added, muted, groups, current_backward()))
    return sentinel_grads


def _groups(late: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> dict[int, GroupHook]:
    """The hooks that wait for several gradients (``register_multi_grad_hook``), by
    ``GroupHook.key``.

    Args:
        late: the parameters whose hooks are called at the end of the backward, by name.
        parameters: all parameters of the graph.

    Raises:
        SplitError: a hook also waits for tensors of this backward that are not parameters of the
            graph.
    """
    groups: dict[int, GroupHook] = {}
    nodes = None
    for name, parameter in late.items():
        for group in group_hooks(parameter):
            if nodes is None:
                nodes = {*nodes_of_leaves(parameters)}
            outside = [node for node in group.nodes or () if node not in nodes]
            if any(map(will_run, outside)):  # unused parameters do not
                _refuse_group(name)
            groups[group.key] = group
    return groups


def _refuse_group(name: str) -> None:
    raise SplitError(
        f"parameter {name} got a hook of register_multi_grad_hook between the forward and the "
        "backward, and that hook also waits for tensors outside of the graph that uses the "
        "parameter: it would be called more than once. Register it before the forward"
    )


_LATE = "_autosplit_late_gradient"


def _add_late(name: str, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
    """Add a gradient to the sum that a parameter has collected in this backward.

    Returns:
        the parameter for the first part of its gradient; None for later parts.

    Raises:
        SplitError: the parameter has a hook, and the engine computes another part of its gradient.
    """
    if grad is None:
        return None
    if any(map(will_run, nodes_of_leaves([parameter]))) and Leaves([parameter]).has_hooks():
        raise SplitError(
            f"parameter {name} got a hook between the forward and the backward, and several graphs "
            "use it: the hook would be called for each part of the gradient. Register hooks on "
            "parameters before the forward"
        )
    backward = current_backward()
    last_backward, total = parameter.__dict__.get(_LATE, (None, None))
    first = last_backward != backward or total is None
    parameter.__dict__[_LATE] = backward, grad if first else total + grad
    return parameter if first else None


def _deliver_late(
    parameters: Sequence[Tensor],
    muted: Sequence[MutedHooks],
    groups: Mapping[int, GroupHook],
    backward: int,
) -> None:
    """Make the engine add the collected gradients to ``.grad`` and call hooks, in one run.

    Args:
        parameters: parameters whose gradients were collected.
        muted: sentinel parameters whose hooks did not run in the backward; each with the gradient
            that its hooks shall get.
        groups: the hooks that wait for several gradients.
        backward: the number of the backward that ends.

    Raises:
        SplitError: a hook that waits for several gradients was already called in this backward.
    """
    pairs = [(parameter, parameter.__dict__.pop(_LATE)[1]) for parameter in parameters]
    for hooks in muted:
        hooks.restore()
        if hooks.gradient is not None:
            pairs.append((hooks.parameter, hooks.gradient))
    if any(group.ran.get(backward) for group in groups.values()):
        raise SplitError(
            "a hook of register_multi_grad_hook was put on parameters between the forward and the "
            "backward, and also waits for tensors outside of the graph that uses them: it would be "
            "called more than once. Register it before the forward"
        )
    if pairs:
        leaves, grads = zip(*pairs, strict=True)
        torch.autograd.backward(leaves, grads)
    for group in groups.values():
        group.ran[backward] = True
