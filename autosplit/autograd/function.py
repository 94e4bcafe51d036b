"""F and I as one autograd function: ``loss.backward()`` comes to I and stops there."""

from __future__ import annotations

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
    will_run,
    without_autocast,
)
from autosplit.torch_internals.distributed import asked_by_pipelining
from autosplit.torch_internals.tracing import untraced

from .deferred_backward import Deferred
from .delivery import Delivery, weight_gradients
from .pending_queue import Backlog

_IS_LEAF = attrgetter("is_leaf")


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
        node: where its gradient would arrive. A backward that is for parameters comes to it;
            ``torch.autograd.grad`` and ``backward(inputs=...)`` do not.
    """

    def __init__(self, queue: Backlog[Deferred], deliver: Delivery) -> None:
        self.queue, self.deliver = queue, deliver
        with torch.inference_mode(False):
            self.anchor = torch.zeros((), requires_grad=True)
            self.node = get_gradient_edge(self.anchor).node


class Split(torch.autograd.Function):
    """F, whose backward is I.

    Parameters are not among the inputs: their gradients come later and by another way. The
    anchor gives the outputs a gradient function all the same. Where a reducer waits for weight
    gradients, the parameters stand behind the leaves, and the backward is I and W.
    """

    @staticmethod
    def forward(
        ctx: Any,
        root: Root,
        functions: SplitFunctions,
        state: State,
        anchor: Tensor,
        *values: Any,
    ) -> tuple[Any, ...]:
        ctx.root, ctx.functions, ctx.state = root, functions, state
        leaves = list(values[: len(functions.capture.inputs)])
        ctx.whole = len(values) > len(leaves)
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
        weights: list[Tensor | None] = [None] * len(functions.parameter_names) * ctx.whole
        if will_run(root.node):
            number = current_backward()
            work = Deferred(functions, handover, early, ctx.state, skipped, number, kept)
            if ctx.whole:
                weights = weight_gradients(work)
            elif all(map(_IS_LEAF, work.parameters)):
                root.queue.add(number, work)
            else:  # computed (torch.func.functional_call): no .grad is to come here
                root.deliver([work])
        elif kept and asked_by_pipelining():
            raise SplitError(
                "a schedule of torch.distributed.pipelining asks for input gradients now and for "
                "weight gradients later, which it looks for where those of a split module are "
                "not; pass dw_builder=lambda: module.backward_weight to its PipelineStage"
            )
        return (None, None, None, None, *grads, *weights)


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
