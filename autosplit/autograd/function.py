"""F and I as one autograd function: ``loss.backward()`` comes to I and stops there."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autosplit.errors import SplitError
from autosplit.runtime.functions import ForwardResult, SplitFunctions
from autosplit.runtime.saved_tensors import State
from autosplit.torch_internals.backward_task import (
    current_backward,
    graph_is_kept,
    has_saved_tensors_hooks,
    is_asked_for,
    will_run,
    without_autocast,
)
from autosplit.torch_internals.distributed import asked_by_pipelining, data_parallel
from autosplit.torch_internals.tracing import untraced

from .deferred_backward import Deferred
from .delivery import Delivery, weight_gradients
from .parameter_request import refuse_asking, sample
from .pending_queue import Backlog

_IS_LEAF = attrgetter("is_leaf")
_NEEDS_GRAD = attrgetter("requires_grad")


def _all_now(root: Root, work: Deferred, tied: Sequence[Tensor]) -> list[Tensor | None]:
    """W at once, after what is pending: for hooks that came between the forward and the backward,
    which the engine calls now for ``tied`` parameters. Returns gradients of these.
    """
    root.queue.compute()
    parameters = [work.state[name] for name in work.functions.parameter_names]
    grads = {id(p): (p, g) for p, g in zip(parameters, weight_gradients(work), strict=True)}
    mine = [grads.pop(id(parameter))[1] for parameter in tied]
    rest = [(parameter, grad) for parameter, grad in grads.values() if grad is not None]
    if rest:
        torch.autograd.backward([p for p, _ in rest], [grad for _, grad in rest])
    return mine


def run_forward(functions: SplitFunctions, state: State, leaves: list[Any]) -> ForwardResult:
    """F on this state; empties ``leaves``. New buffer values are written back."""
    with without_autocast():
        result = functions.forward(state, leaves)
    if functions.updated_state:
        with torch.no_grad():
            for name, value in zip(functions.updated_state, result.updates, strict=True):
                state[name].copy_(value)
    return result


class Root:
    """What stands among the inputs in the place of the parameters.

    Attributes:
        queue: where a backward leaves what is pending.
        deliver: delivers at once.
        anchor: a leaf that requires a gradient and never gets one.
        node: where its gradient would arrive. A backward that accumulates into whatever it finds
            comes to it; ``torch.autograd.grad`` and ``backward(inputs=...)`` do not.
    """

    def __init__(self, queue: Backlog[Deferred], deliver: Delivery) -> None:
        self.queue, self.deliver = queue, deliver
        with torch.inference_mode(False):
            self.anchor = torch.zeros((), requires_grad=True)
            self.node = get_gradient_edge(self.anchor).node


def run_split(
    root: Root, functions: SplitFunctions, state: State, leaves: Sequence[Any], together: bool
) -> list[Any]:
    """F as a node of autograd's graph. With ``together`` its backward is I and W."""
    parameters = [state[name] for name in functions.parameter_names]
    # Computed ones (torch.func.functional_call): no .grad is to come there.
    whole = together or not all(map(_IS_LEAF, parameters))
    behind = parameters
    if not whole:  # data parallelism counts how often the engine comes by
        tied = not data_parallel() and not root.deliver.leaves(functions, state).watched()
        behind = sample(parameters) if tied else []
    return list(Split.apply(root, functions, state, root.anchor, whole, *leaves, *behind))  # type: ignore[no-untyped-call]


class Split(torch.autograd.Function):
    """F, whose backward is I.

    Gradients of parameters come later and by another way. The anchor gives the outputs a gradient
    function all the same, and a few parameters stand behind the leaves, see ``sample``. Where a
    reducer waits for weight gradients, or parameters are computed, all of them stand there, and
    the backward is I and W.
    """

    @staticmethod
    def forward(
        ctx: Any,
        root: Root,
        functions: SplitFunctions,
        state: State,
        anchor: Tensor,
        whole: bool,
        *values: Any,
    ) -> tuple[Any, ...]:
        ctx.root, ctx.functions, ctx.state = root, functions, state
        leaves = list(values[: len(functions.capture.inputs)])
        ctx.whole, ctx.behind = whole, len(values) - len(leaves)
        # What a loop made itself (a batch) it may write into once backward() is over. What an
        # earlier module computed it has no hold of.
        ctx.batch = {at for _, at in functions.lent if at is not None and _is_batch(leaves[at])}
        del values
        outputs, _, ctx.saved = run_forward(functions, state, leaves)
        ctx.packed = has_saved_tensors_hooks()
        if ctx.packed:
            ctx.save_for_backward(*ctx.saved.tensors)
            ctx.saved.put_away()
        ctx.set_materialize_grads(False)
        # Tensors of their own on the same storage: a saved output would keep its own graph
        # alive, and autograd forbids writing into a view that a function returns.
        outputs = [v.detach() if isinstance(v, Tensor) else v for v in outputs]
        if functions.constant_outputs:
            constant = [outputs[at] for at in functions.constant_outputs]
            ctx.mark_non_differentiable(*[v for v in constant if isinstance(v, Tensor)])
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        root: Root = ctx.root
        functions: SplitFunctions = ctx.functions
        _check_backward(ctx)
        functions.autocast_guard.check()
        arrived = list(output_grads)
        del output_grads
        absent = functions.dependence.absent(arrived)
        skipped = functions.dependence.without_gradient(absent)
        idle = functions.dependence.idle_inputs(absent)
        saved = ctx.saved
        kept = graph_is_kept()
        ctx.saved = saved.again() if kept else None
        if ctx.packed:
            saved.bring_back(ctx.saved_tensors)
        with without_autocast():
            grads, handover, early = functions.backward_input(saved, arrived)
        for at in idle:  # autograd knows no gradient from a gradient of zeros
            grads[at] = None
        weights: list[Tensor | None] = [None] * ctx.behind
        ordinary = will_run(root.node)
        behind = [node for node, _ in ctx.next_functions[len(ctx.next_functions) - ctx.behind :]]
        asked = not ordinary and any(node and is_asked_for(node) for node in behind)
        if asked and not ctx.whole:
            refuse_asking()
        if ordinary or asked:
            number = current_backward()
            names = functions.parameter_names
            if not all(map(_NEEDS_GRAD, map(ctx.state.__getitem__, names))):
                # Frozen since the forward: autograd drops their gradients.
                skipped |= {name for name in names if not ctx.state[name].requires_grad}
            work = Deferred(functions, handover, early, ctx.state, skipped, number)
            if ctx.whole:
                weights = weight_gradients(work)
            elif behind and root.deliver.leaves(functions, ctx.state).watched():
                weights = _all_now(root, work, [node.variable for node in behind])
            else:
                lent = [p for p, at in functions.lent if at in ctx.batch or handover.is_shared(p)]
                handover.own(lent)
                root.queue.add(number, work)
        elif kept and asked_by_pipelining():
            raise SplitError(
                "a schedule of torch.distributed.pipelining asks for input gradients now and for "
                "weight gradients later, which it looks for where those of a split module are "
                "not; pass dw_builder=lambda: module.backward_weight to its PipelineStage"
            )
        return (None, None, None, None, None, *grads, *weights)


def _is_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_leaf


def _check_backward(ctx: Any) -> None:
    if torch.is_grad_enabled():
        raise SplitError(
            "create_graph=True: a split backward cannot be differentiated again; run the "
            "unsplit model where double backward is needed"
        )
    if ctx.saved is None:
        raise SplitError(
            "backward() a second time through the same call of a split module: what the "
            "forward saved is gone after the first. Pass retain_graph=True to the first, sum "
            "the losses before one backward(), or call the module again"
        )
