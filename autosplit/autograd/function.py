"""The autograd node of a split module. Its forward runs F; its backward runs I and queues W.

    inputs ─────────┐
    anchor.leaf ────┤ Split ──> outputs       forward: F
    sentinels ──────┘                         backward: I, then W is queued or runs at once

The node refuses backwards for which its gradients would be wrong: ``torch.autograd.grad`` of
parameters, and gradients of outputs from which the module computes other outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autosplit.errors import SplitError, with_code
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.residuals import Residuals, State
from autosplit.text.figures import few
from autosplit.torch_internals.autograd import (
    Leaves,
    LeavesCache,
    at_end_of_backward,
    call_backward_directly,
    checks_nan,
    current_backward,
    direct_apply,
    graph_is_kept,
    has_accumulate_hooks,
    has_hooks_of_users,
    has_saved_tensors_hooks,
    in_compiled_autograd,
    is_autocast,
    is_requested,
    leaves_before,
    untraced,
)
from autosplit.torch_internals.distributed import called_by_stage_backward
from autosplit.torch_internals.group_hooks import HooksOfGradients

from .delivery import weight_gradients
from .late_hooks import weights_for_late_hooks
from .pending import PendingQueue, PendingWork
from .slices import BackwardSlices

if TYPE_CHECKING:
    from autosplit.sharded import ShardedModule


_NEEDS_GRAD = attrgetter("requires_grad")


class WeightAnchor:
    """The input of a split module's autograd node that represents all parameters of the module.

    Attributes:
        queue: the queue of deferred weight gradients.
        leaves: looks parameters up by name.
        sharded: gathers the parameters of a sharded module; None for other modules.
        leaf: a tensor that requires a gradient and never gets one.
        node: gradient accumulator of ``leaf``. The engine visits it in an ordinary backward, but
            not for ``torch.autograd.grad`` or ``backward(inputs=...)``.
        alternative: the model to use where a split backward is refused, as text for errors.
    """

    def __init__(
        self,
        queue: PendingQueue,
        sharded: ShardedModule | None = None,
        leaves: LeavesCache | None = None,
        alternative: str = "the unsplit model (.unsplit)",
    ) -> None:
        self.queue, self.sharded, self.alternative = queue, sharded, alternative
        self.leaves = leaves or LeavesCache()
        with torch.inference_mode(False):
            self.leaf = torch.zeros((), requires_grad=True)
            self.node = get_gradient_edge(self.leaf).node


def run_split(
    anchor: WeightAnchor,
    functions: SplitFunctions,
    state: State,
    leaves: Sequence[Any],
    fused_backward: bool,
    *,
    in_data_parallel: bool,
) -> list[Any]:
    """Run F as a node of autograd's graph, whose backward is I.

    Args:
        anchor: stands for the parameters among the node's inputs.
        functions: F, I and W.
        state: parameters and buffers by name.
        leaves: the other inputs of the graph.
        fused_backward: whether the backward runs W directly after I. It does so, too, if a
            parameter has hooks, because hooks fire in ``backward()``, and an optimizer may step in
            a hook.
        in_data_parallel: whether data parallelism wraps the module. Data parallelism counts the
            engine's visits of parameters, so the node then has no sentinel parameters.
    """
    parameter_leaves = anchor.leaves.lookup(functions.parameter_names, state)
    parameters = parameter_leaves.parameters
    if not fused_backward and parameter_leaves.has_hooks():
        fused_backward = True
        anchor.queue.compute()
    # Computed parameters (torch.func.functional_call) have no .grad to defer.
    fused_backward = fused_backward or not parameter_leaves.are_leaves
    sentinel_parameters: Sequence[Tensor] = parameters
    if not fused_backward:
        sentinel_parameters = () if in_data_parallel else functions.sentinel_parameters(parameters)
    leaf, slices = anchor.leaf, None
    if in_data_parallel and fused_backward and _is_sliced(anchor, functions):
        slices = BackwardSlices(functions, state)
        leaf, sentinel_parameters = slices.anchor(leaf, leaves), slices.parameters[0]
    call = _Call(
        functions, state, anchor, parameter_leaves, fused_backward, len(sentinel_parameters), slices
    )
    return list(_apply(call, leaf, *leaves, *sentinel_parameters))


def _is_sliced(anchor: WeightAnchor, functions: SplitFunctions) -> bool:
    """Whether autograd can run the backward in slices: no parameter is sharded, and there are
    several slices.
    """
    plain = anchor.sharded is None and not functions.capture.shardings and not checks_nan()
    return plain and len(functions.backward_graphs.sliced.parameters) > 1


class _Call(NamedTuple):
    """One forward call of a split graph, which ``Split`` keeps for its backward.

    Attributes:
        functions: F, I and W of the graph.
        state: parameters and buffers by name.
        anchor: the input that stands for the parameters.
        parameter_leaves: the parameters and their hooks.
        fused_backward: whether the backward runs I and W.
        sentinel_count: number of parameters at the end of the node's inputs.
        slices: the nodes that run the backward in slices; None if one node runs the whole backward.
    """

    functions: SplitFunctions
    state: State
    anchor: WeightAnchor
    parameter_leaves: Leaves
    fused_backward: bool
    sentinel_count: int
    slices: BackwardSlices | None


class Split(torch.autograd.Function):
    """The autograd function of a split graph: its forward is F, its backward is I.

    W computes the gradients of parameters later. The anchor is an input, so that outputs have a
    ``grad_fn`` even if no other input requires a gradient. A few parameters, the sentinels, are
    inputs too. They let the backward detect requests for gradients of parameters, see
    ``SplitFunctions.sentinel_parameters``. If a reducer waits for weight gradients, or if
    parameters are computed tensors, all parameters are inputs and the backward runs I and W.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, _leaf: Tensor, *values: Any) -> tuple[Any, ...]:
        """Run F and keep its residuals in ``ctx`` for the backward.

        Args:
            ctx: autograd's context of the node.
            call: the call.
            _leaf: the anchor's leaf.
            values: the inputs of the graph, then the sentinel parameters.
        """
        ctx.call = call
        functions, sharded = call.functions, call.anchor.sharded
        ctx.writes = () if sharded is None else sharded.writes()
        leaves = list(values[: len(values) - call.sentinel_count])
        # A training loop may write into its own batch after backward(), but it has no reference to
        # the outputs of an earlier module. So W needs its own copy of the batch only.
        ctx.batch = {
            at for _, at in functions.caller_memory if at is not None and _is_batch(leaves[at])
        }
        del values
        outputs, _, ctx.saved = functions.run(call.state, leaves)
        ctx.packed = has_saved_tensors_hooks()
        if ctx.packed:
            ctx.save_for_backward(*ctx.saved.tensors)
            ctx.saved.drop_tensors()
        ctx.set_materialize_grads(False)
        # New tensors on the same storage: a saved output would keep its own graph alive, and
        # autograd forbids writing into a view that a function returns.
        outputs = [v.detach() if isinstance(v, Tensor) else v for v in outputs]
        inside = functions.dependence.read_inside
        # Weak references, which keep no output alive.
        ctx.watched = [(name, weakref.ref(outputs[at])) for name, at in inside] if inside else ()
        if functions.constant_outputs:
            constant = [outputs[at] for at in functions.constant_outputs]
            ctx.mark_non_differentiable(*[v for v in constant if isinstance(v, Tensor)])
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run I; queue W, or run it if the caller waits for weight gradients.

        Returns:
            gradients of the inputs of ``forward``; None for the call and the anchor's leaf.

        Raises:
            SplitError: the gradients would be wrong, or the backward runs a second time.
        """
        call: _Call = ctx.call
        functions, anchor, saved = call.functions, call.anchor, ctx.saved
        if saved is None or torch.is_grad_enabled() or in_compiled_autograd():
            _refuse_backward(anchor.alternative)
        if ctx.watched:
            _refuse_partial_gradients(ctx.watched, anchor.alternative)
        if is_autocast():
            functions.autocast_guard.check_autocast()
        arrived = list(output_grads)
        del output_grads
        functions, (skipped, idle, _) = functions.for_gradients(arrived)
        _limit_hooks(call, skipped)
        if idle:
            for leaf in leaves_before(_input_nodes(ctx)):
                HooksOfGradients(leaf)
        kept = graph_is_kept()
        ctx.saved = saved.duplicate() if kept else None
        if ctx.packed:
            saved.restore_tensors(ctx.saved_tensors)
        if anchor.sharded is not None:
            anchor.sharded.check_writes(ctx.writes)
        if call.slices is not None:
            remaining = functions.backward_slices(saved, arrived)
            call.slices.begin_backward(remaining, functions.dependence.borrowed, skipped, idle)
            input_grads = [None] * len(functions.capture.inputs)  # the last slice has them
            return (None, call.slices.zero, *input_grads, *call.slices.weights(0))
        grads, deferred, early = functions.backward_input(saved, arrived)
        for at in idle:  # autograd distinguishes no gradient from a gradient of zeros
            grads[at] = None
        weights: Sequence[Tensor | None] = [None] * call.sentinel_count
        # A stage in parts wants the gradient of the anchor from ``torch.autograd.grad``.
        ordinary = is_requested(anchor.node)
        requested = not ordinary and any(
            node and is_requested(node) for node in _sentinel_nodes(ctx)
        )
        if requested and not call.fused_backward:
            _refuse_parameter_request(anchor.alternative)
        if ordinary or requested:
            weights = _queue_or_run_weights(ctx, functions, deferred, early, skipped) or weights
        elif kept and called_by_stage_backward():
            _refuse_pipelining()
        return (None, None, *grads, *weights)


_apply = direct_apply(Split)
call_backward_directly(Split)


def _sentinel_nodes(ctx: Any) -> list[Any]:
    """Autograd's nodes of the sentinel parameters. They show whether the running backward requests
    weight gradients.
    """
    edges = ctx.next_functions
    return [node for node, _ in edges[len(edges) - ctx.call.sentinel_count :]]


def _input_nodes(ctx: Any) -> list[Any]:
    """Autograd's nodes of the inputs; with slices, the node of the next slice."""
    edges = ctx.next_functions
    return [node for node, _ in edges[: len(edges) - ctx.call.sentinel_count]]


def _limit_hooks(call: _Call, names: Collection[str]) -> None:
    """Call the hooks of these parameters in this backward only if the parameters get a gradient."""
    if names and call.parameter_leaves.has_hooks():
        for name in names:
            HooksOfGradients(call.state[name])


def _queue_or_run_weights(
    ctx: Any,
    functions: SplitFunctions,
    deferred: Residuals,
    early: Sequence[Tensor],
    skipped: frozenset[str],
) -> Sequence[Tensor | None]:
    """Queue W, or run it now if this backward must return or accumulate weight gradients.

    Returns:
        gradients of the sentinel parameters; empty if W is queued.
    """
    _, state, anchor, parameter_leaves, fused_backward, _, _ = ctx.call
    if not fused_backward:  # the engine drops gradients of frozen parameters, after their hooks
        frozen = _frozen(ctx.call)
        _limit_hooks(ctx.call, frozen)
        skipped |= frozen
    if skipped.issuperset(functions.parameter_names) and not functions.sums:
        return ()
    work = PendingWork(functions, deferred, state, skipped, early)
    sharded = anchor.sharded
    if sharded is None:
        work.leaves = parameter_leaves.parameters
    else:
        work.owner, work.writes = sharded.owner, ctx.writes
    if fused_backward:
        return weight_gradients(work)
    if parameter_leaves.has_hooks():
        sentinels = [node.variable for node in _sentinel_nodes(ctx)]
        return weights_for_late_hooks(anchor.queue, work, sentinels)
    if functions.caller_memory:
        positions = [
            p for p, at in functions.caller_memory if at in ctx.batch or deferred.is_shared(p)
        ]
        deferred.copy_at(positions)
    if functions.visible_deferred:
        at_end_of_backward(partial(deferred.copy_reachable, functions.visible_deferred))
    anchor.queue.add(current_backward(), work)
    if early and not deferred.tensors:  # I computed all of them: free them now, not in W
        at_end_of_backward(anchor.queue.compute)
    if sharded is not None and has_accumulate_hooks(sharded.parameters):
        # A hook waits for gradients of sharded parameters: an optimizer may step in it.
        at_end_of_backward(anchor.queue.compute)
    return ()


def _frozen(call: _Call) -> frozenset[str]:
    """Names of the parameters that were frozen after the forward; autograd drops their
    gradients.
    """
    if all(map(_NEEDS_GRAD, call.parameter_leaves.parameters)):
        return frozenset()
    names, state = call.functions.parameter_names, call.state
    return frozenset([name for name in names if not state[name].requires_grad])


def _is_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_leaf


def _refuse_backward(alternative: str) -> NoReturn:
    if torch.is_grad_enabled():
        raise SplitError(
            "create_graph=True: a split backward cannot be differentiated again; run "
            f"{alternative} for double backward"
        )
    if in_compiled_autograd():
        raise SplitError(
            "compiled autograd would lose deferred weight gradients; call backward() outside of "
            "compiled autograd"
        )
    raise SplitError(
        with_code(
            "backward() a second time through the same call of a split module: the tensors that "
            "the forward saved were freed by the first. Pass retain_graph=True to the first, sum "
            "the losses before one backward(), or call the module again",
            wrong="first_loss.backward()\nsecond_loss.backward()",
            right="(first_loss + second_loss).backward()",
        )
    )


def _refuse_pipelining() -> None:
    raise SplitError(
        "this schedule of torch.distributed.pipelining computes weight gradients from autograd's "
        "graph, which does not contain the weight gradients of a split module. Pass the module to "
        "autosplit.pipelining.SplitPipelineStage, or pass "
        "dw_builder=autosplit.pipelining.dw_builder(module) to torch's PipelineStage"
    )


def _refuse_parameter_request(alternative: str) -> NoReturn:
    raise SplitError(
        "torch.autograd.grad or backward(inputs=...) requests gradients of parameters of a split "
        "module, which that backward does not compute. Call loss.backward() and read .grad, or "
        f"compute the loss with {alternative}, which has the same parameters"
    )


def _refuse_partial_gradients(
    watched: Iterable[tuple[str, weakref.ref[Tensor]]], alternative: str
) -> None:
    """Check that nothing reads the gradient of an output that would get a partial gradient.

    Args:
        watched: names of such outputs, and weak references to them.
        alternative: see ``WeightAnchor``.

    Raises:
        SplitError: an output has a hook or ``retain_grad()``.
    """
    for name, reference in watched:
        tensor = reference()
        if tensor is None or not (tensor.retains_grad or has_hooks_of_users(tensor)):
            continue
        raise SplitError(
            f"{name} has a hook or retain_grad() and would get a partial gradient, because the "
            "module also computes other outputs from it. Take the gradient in "
            f"{alternative}, or split the module in two at {name}"
        )


def hooks_text(named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Report section on parameters with hooks; empty if no parameter has a hook."""
    names = [name for name, parameter in named_parameters if Leaves([parameter]).has_hooks()]
    if not names:
        return []
    return [
        "backward() also computes weight gradients, because hooks wait for them: "
        f"{few(names, 3)}. Without hooks on parameters they are deferred."
    ]
