"""The autograd node of a split module: forward runs F, backward runs I and queues W."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autosplit.errors import SplitError
from autosplit.runtime.functions import ForwardResult, SplitFunctions
from autosplit.runtime.residuals import Residuals, State
from autosplit.torch_internals.autograd import (
    at_end_of_backward,
    current_backward,
    graph_is_kept,
    has_accumulate_hooks,
    has_saved_tensors_hooks,
    is_asked_for,
    will_run,
    without_autocast,
)
from autosplit.torch_internals.distributed import asked_by_pipelining, data_parallel
from autosplit.torch_internals.tracing import untraced

from .deferred_backward import DeferredBackward
from .delivery import Delivery, weight_gradients
from .parameter_request import probe_sample, refuse_parameter_request
from .partial_gradient import refuse_partial, watch
from .pending_queue import PendingQueue

if TYPE_CHECKING:
    from autosplit.sharded.module import ShardedModule, Writes

_IS_LEAF = attrgetter("is_leaf")
_NEEDS_GRAD = attrgetter("requires_grad")


def run_forward(functions: SplitFunctions, state: State, leaves: list[Any]) -> ForwardResult:
    """F on this state; empties ``leaves``. New buffer values are written back."""
    with without_autocast():
        result = functions.forward(state, leaves)
    if functions.updated_state:
        with torch.no_grad():
            for name, value in zip(functions.updated_state, result.updates, strict=True):
                state[name].copy_(value)
    return result


class WeightAnchor:
    """The input of a split module's autograd node that stands for all of its parameters.

    Attributes:
        queue: where a backward leaves its deferred weight gradients.
        deliver: delivers at once.
        sharded: gathers the parameters, where they are sharded.
        leaf: requires a gradient and never gets one.
        node: its gradient accumulator. A backward that accumulates into whatever it finds comes to
            it; ``torch.autograd.grad`` and ``backward(inputs=...)`` do not.
    """

    def __init__(
        self,
        queue: PendingQueue[DeferredBackward],
        deliver: Delivery,
        sharded: ShardedModule | None = None,
    ) -> None:
        self.queue, self.deliver, self.sharded = queue, deliver, sharded
        with torch.inference_mode(False):
            self.leaf = torch.zeros((), requires_grad=True)
            self.node = get_gradient_edge(self.leaf).node

    def check(self, writes: Writes) -> None:
        """Refuse a backward on other sharded parameters than those of the forward."""
        if self.sharded is not None:
            self.sharded.check(writes)

    @property
    def owner(self) -> Any:
        """What gives a leaf's parameter, where leaves are gathered ones."""
        return None if self.sharded is None else self.sharded.owner

    def compute_in_backward(self) -> None:
        """Compute what is pending before the backward ends, where a hook waits for gradients of
        sharded parameters: an optimizer may step in it.
        """
        if self.sharded is not None and has_accumulate_hooks(self.sharded.parameters):
            at_end_of_backward(self.queue.compute)


def run_split(
    anchor: WeightAnchor,
    functions: SplitFunctions,
    state: State,
    leaves: Sequence[Any],
    unsplit: bool,
) -> list[Any]:
    """F as a node of autograd's graph, whose backward is I, or with ``unsplit`` I and W."""
    parameters = [state[name] for name in functions.parameter_names]
    # Computed ones (torch.func.functional_call): no .grad is to come there.
    unsplit = unsplit or not all(map(_IS_LEAF, parameters))
    probes = parameters
    if not unsplit:  # data parallelism counts how often the engine comes by
        free = not data_parallel() and not anchor.deliver.leaves(functions, state).has_hooks()
        probes = probe_sample(parameters) if free else []
    return list(
        Split.apply(functions, state, anchor, unsplit, anchor.leaf, *leaves, *probes)  # type: ignore[no-untyped-call]
    )


class Split(torch.autograd.Function):
    """F, whose backward is I.

    Gradients of parameters come later, from W. The anchor gives the outputs a gradient
    function all the same, and a few parameters are inputs besides, see ``probe_sample``. Where a
    reducer waits for weight gradients, or parameters are computed, all of them are, and the
    backward is I and W.
    """

    @staticmethod
    def forward(
        ctx: Any,
        functions: SplitFunctions,
        state: State,
        anchor: WeightAnchor,
        unsplit: bool,
        _leaf: Tensor,
        *values: Any,
    ) -> tuple[Any, ...]:
        ctx.anchor, ctx.functions, ctx.state = anchor, functions, state
        ctx.writes = () if anchor.sharded is None else anchor.sharded.writes()
        leaves = list(values[: len(functions.capture.inputs)])
        ctx.unsplit, ctx.probes = unsplit, len(values) - len(leaves)
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
        ctx.watched = watch((n, outputs[at]) for n, at in functions.dependence.read_inside)
        if functions.constant_outputs:
            constant = [outputs[at] for at in functions.constant_outputs]
            ctx.mark_non_differentiable(*[v for v in constant if isinstance(v, Tensor)])
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        functions: SplitFunctions = ctx.functions
        _check_backward(ctx)
        refuse_partial(ctx.watched)
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
        ctx.anchor.check(ctx.writes)
        with without_autocast():
            grads, deferred, early = functions.backward_input(saved, arrived)
        for at in idle:  # autograd knows no gradient from a gradient of zeros
            grads[at] = None
        weights: Sequence[Tensor | None] = [None] * ctx.probes
        ordinary = will_run(ctx.anchor.node)
        probes = [node for node, _ in ctx.next_functions[len(ctx.next_functions) - ctx.probes :]]
        asked = not ordinary and any(node and is_asked_for(node) for node in probes)
        if asked and not ctx.unsplit:
            refuse_parameter_request()
        if ordinary or asked:
            weights = _weights(ctx, deferred, early, skipped, probes) or weights
        elif kept and asked_by_pipelining():
            _refuse_pipelining()
        elif functions.writes_late:  # whoever asks for input gradients has the backward write, too
            with without_autocast():
                functions.backward_weight(deferred)
        return (None, None, None, None, None, *grads, *weights)


def _weights(
    ctx: Any,
    deferred: Residuals,
    early: Sequence[Tensor],
    skipped: frozenset[str],
    probes: Sequence[Any],
) -> Sequence[Tensor | None]:
    """Queue W, or run it now for a caller that waits for weight gradients in this backward.

    Returns:
        gradients of the parameters among the node's inputs; nothing where W is queued.
    """
    anchor: WeightAnchor = ctx.anchor
    functions: SplitFunctions = ctx.functions
    state, number, names = ctx.state, current_backward(), functions.parameter_names
    if not all(map(_NEEDS_GRAD, map(state.__getitem__, names))):
        # Frozen since the forward: autograd drops their gradients.
        skipped |= {name for name in names if not state[name].requires_grad}
    owner, writes = anchor.owner, ctx.writes
    work = DeferredBackward(functions, deferred, early, state, skipped, number, owner, writes)
    if ctx.unsplit:
        return weight_gradients(work)
    if anchor.deliver.leaves(functions, state).has_hooks():
        return _weights_for_late_hooks(anchor, work, [node.variable for node in probes])
    lent = [p for p, at in functions.lent if at in ctx.batch or deferred.is_shared(p)]
    deferred.own(lent)
    anchor.queue.add(number, work)
    anchor.compute_in_backward()
    return ()


def _weights_for_late_hooks(
    anchor: WeightAnchor, work: DeferredBackward, probes: Sequence[Tensor]
) -> list[Tensor | None]:
    """W at once, after everything pending: for hooks that came between the forward and the
    backward, which the engine calls now for ``probes``. Returns gradients of these.
    """
    anchor.queue.compute()
    parameters = [work.state[name] for name in work.functions.parameter_names]
    grads = {id(p): (p, g) for p, g in zip(parameters, weight_gradients(work), strict=True)}
    mine = [grads.pop(id(parameter))[1] for parameter in probes]
    rest = [(parameter, grad) for parameter, grad in grads.values() if grad is not None]
    if rest:
        torch.autograd.backward([p for p, _ in rest], [grad for _, grad in rest])
    return mine


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


def _refuse_pipelining() -> None:
    raise SplitError(
        "a schedule of torch.distributed.pipelining asks for input gradients now and for "
        "weight gradients later, which it looks for where those of a split module are "
        "not; give the module to autosplit.pipelining.SplitPipelineStage, or pass "
        "dw_builder=autosplit.pipelining.dw_builder(module) to torch's PipelineStage"
    )
