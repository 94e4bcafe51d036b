"""Our graphs for torchtitan's graph pipelining: its protocol ``GraphPPStageGraphs``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.autograd.function import run_forward
from autosplit.errors import PipelineError
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.specializations.call_signature import CallFlattening
from autosplit.runtime.specializations.specialization import Specializations
from autosplit.runtime.split_options import SplitOptions
from autosplit.torch_internals.autograd.backward_task import without_autocast
from autosplit.torch_internals.ddp_reducer import refuse_sharded
from autosplit.torch_internals.pytree import tree_unflatten

from .arguments import no_context, unwrapped
from .results import Results

_MAX_GRAPHS = 64

Values = list[Any]


class SplitStageGraphs:
    """F, I, W and B of one stage, as torchtitan's ``GraphPipelineRuntime`` calls them: with
    parameters, buffers and gradients as flat lists. The last stage's are those of the module and
    its loss.

    Parameters are whole, so that ``unshard_params`` and ``reduce_grads`` hand on what they get.

    Args:
        module: the stage's module.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)``, for the last stage; else None.
        index: the stage's place.
        backend: how graphs are run, see ``autosplit.split``.
        memory: what one microbatch holds, see ``autosplit.split``.

    Raises:
        PipelineError: the module is compiled already.
        ShardedError: it is sharded.
    """

    supports_backward_input_weight_split = True

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        index: int = 0,
        backend: str = "eager",
        memory: str | int = "balanced",
    ) -> None:
        refuse_sharded(module)
        self._module = unwrapped(module, index)
        self._whole = self._module if loss_fn is None else _WithLoss(self._module, loss_fn)
        self._prefix = "" if loss_fn is None else "stage."
        self._index = index
        self._flatten = CallFlattening()
        options = SplitOptions(backend, memory, late_input=True)
        self._plain = self._graphs_of(self._module, options)
        self._graphs = self._graphs_of(self._whole, options)
        named = [*self._module.named_parameters(remove_duplicate=False)]
        self._parameters = [name for name, _ in named]
        self._trained = [name for name, parameter in named if parameter.requires_grad]
        self._buffers = [name for name, _ in self._module.named_buffers(remove_duplicate=False)]

    @property
    def num_unsharded_param_grad_values(self) -> int:
        """How many parameters are trained, those with two names twice."""
        return len(self._trained)

    def unshard_params(
        self, flat_param_values: Values, *, runtime_validate: bool = False
    ) -> Values:
        """Parameters as F takes them: these."""
        return flat_param_values

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        loss_kwargs: dict[str, Any],
        *,
        unsharded_param_values: Values,
        flat_buffer_values: Values,
        runtime_validate: bool = False,
    ) -> tuple[Any, tuple[Any, ...]]:
        """F: the result, on the last stage the loss, and what a backward is given of it.

        Raises:
            CaptureError: the module is not one graph.
            PipelineError: there are other parameters or buffers than the module has.
        """
        graphs, prefix = self._graphs, self._prefix
        inputs = len(self._flatten(args, {})[0])
        if prefix and target is None:  # an evaluation without a loss
            graphs, prefix = self._plain, ""
        elif prefix:
            args, kwargs = (args, kwargs, target, loss_kwargs), {}
        leaves, structure = self._flatten(args, kwargs)
        functions = graphs.fitting(args, kwargs, leaves, structure)
        values = [*unsharded_param_values, *flat_buffer_values]
        names = [*self._parameters, *self._buffers]
        if len(values) != len(names):
            raise PipelineError(
                f"stage {self._index} has {len(names)} parameters and buffers, got {len(values)}"
            )
        state = {f"{prefix}{name}": value for name, value in zip(names, values, strict=True)}
        with torch.no_grad():
            result = run_forward(functions, state, leaves)
        made = Results(functions)
        output = tree_unflatten(result.outputs[: made.count], made.spec)
        if not functions.has_backward:
            return output, ()
        return output, (functions, result.saved, inputs)

    def full_backward(
        self,
        stage_output: tuple[Any, ...],
        saved_values_for_backward: tuple[Any, ...],
        output_grads_from_next: tuple[Any, ...],
        *,
        runtime_validate: bool = False,
    ) -> tuple[Values, Values]:
        """B: gradients of the positional inputs, and of the trained parameters."""
        if not saved_values_for_backward:
            return [], [None] * len(self._trained)
        functions, saved, count = saved_values_for_backward
        grads = self._arrived(functions, stage_output, output_grads_from_next)
        with torch.no_grad(), without_autocast():
            found, weights = functions.backward(saved, grads)
        return found[:count], self._in_order(functions, functions.parameter_names, weights)

    def backward_input(
        self,
        stage_output: tuple[Any, ...],
        saved_values_for_backward: tuple[Any, ...],
        output_grads_from_next: tuple[Any, ...],
        *,
        runtime_validate: bool = False,
    ) -> tuple[Values, tuple[Any, ...]]:
        """I: gradients of the positional inputs, and what W is given."""
        if not saved_values_for_backward:
            return [], ()
        functions, saved, count = saved_values_for_backward
        grads = self._arrived(functions, stage_output, output_grads_from_next)
        with torch.no_grad(), without_autocast():
            found, deferred, early = functions.backward_input(saved, grads)
        return found[:count], (functions, deferred, early)

    def backward_weight(self, saved_values_for_backward_weight: tuple[Any, ...]) -> Values:
        """W: gradients of the trained parameters."""
        if not saved_values_for_backward_weight:
            return [None] * len(self._trained)
        functions, deferred, early = saved_values_for_backward_weight
        with torch.no_grad(), without_autocast():
            late = functions.backward_weight(deferred)
        names = [*functions.early_parameters, *functions.late_parameters]
        return self._in_order(functions, names, [*early, *late])

    def reduce_grads(
        self, unsharded_param_grads: Values, *, runtime_validate: bool = False
    ) -> Values:
        """Gradients over all ranks that hold a parameter: this one."""
        return unsharded_param_grads

    def param_grads_for_accumulation(self, sharded_param_grads: Values) -> Values:
        """Gradients in the order of the trained parameters: these."""
        return sharded_param_grads

    def _graphs_of(self, module: nn.Module, options: SplitOptions) -> Specializations:
        computed = self._index > 0
        return Specializations(module, options, _MAX_GRAPHS, True, no_context, computed=computed)

    def _arrived(
        self, functions: SplitFunctions, outputs: tuple[Any, ...], grads: Sequence[Any]
    ) -> list[Tensor | None]:
        """Gradients of the outputs; of a loss, one."""
        given = [torch.ones_like(outputs[0])] if self._prefix else list(grads)
        return Results(functions).arrived(given)

    def _in_order(
        self, functions: SplitFunctions, names: Sequence[str], grads: Sequence[Tensor]
    ) -> Values:
        """Gradients in the order of the trained parameters, each a tensor of its own."""
        borrowed = functions.dependence.borrowed
        found = {
            name.removeprefix(self._prefix): grad.clone() if name in borrowed else grad
            for name, grad in zip(names, grads, strict=True)
        }
        return [found.get(name) for name in self._trained]


class SplitGraphProvider:
    """Gives the stages of a schedule of torchtitan's graph pipelining our graphs:
    ``register_graph_pp_schedule(schedule, graph_provider=SplitGraphProvider(loss_fn))``.

    Args:
        loss_fn: the schedule's loss.
        backend: how graphs are run, see ``autosplit.split``.
        memory: what one microbatch holds, see ``autosplit.split``.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        *,
        backend: str = "eager",
        memory: str | int = "balanced",
    ) -> None:
        self._loss_fn = loss_fn
        self._options = {"backend": backend, "memory": memory}

    def prepare_graphs(
        self, schedule: Any, ctx: Any, *, loss_kwargs: dict[str, Any]
    ) -> dict[tuple[int, int], OneAfterTheOther]:
        """Attach graphs to stages that have none; they are captured at the first microbatch.

        Returns:
            For each pair of stages, what runs a forward and a backward that may overlap.
        """
        for stage in schedule._stages:
            if stage.graphs is None:
                loss = self._loss_fn if stage.is_last else None
                options: Any = {"index": stage.stage_index, **self._options}
                stage.set_graphs(SplitStageGraphs(stage.submod, loss, **options))
        held = {stage.stage_index: stage.graphs for stage in schedule._stages}
        return {(f, b): OneAfterTheOther(held[f], held[b]) for f in held for b in held}


class OneAfterTheOther:
    """A forward and a backward that may overlap, the backward first: somebody waits for it."""

    def __init__(self, forward: SplitStageGraphs, backward: SplitStageGraphs) -> None:
        self._forward = forward
        self._backward = backward

    def forward_backward(
        self,
        *,
        backward_stage_output: tuple[Any, ...],
        backward_saved_values_for_backward: tuple[Any, ...],
        output_grads_from_next: tuple[Any, ...],
        forward_args: tuple[Any, ...],
        forward_kwargs: dict[str, Any],
        forward_target: Any,
        forward_loss_kwargs: dict[str, Any],
        forward_unsharded_param_values: Values,
        forward_flat_buffer_values: Values,
        runtime_validate: bool = False,
    ) -> tuple[Values, Values, Any, tuple[Any, ...]]:
        """B of one stage and F of another: the results of both."""
        inputs, weights = self._backward.full_backward(
            backward_stage_output, backward_saved_values_for_backward, output_grads_from_next
        )
        output, saved = self._forward.forward(
            forward_args,
            forward_kwargs,
            forward_target,
            forward_loss_kwargs,
            unsharded_param_values=forward_unsharded_param_values,
            flat_buffer_values=forward_flat_buffer_values,
        )
        return inputs, weights, output, saved


class _WithLoss(nn.Module):
    def __init__(self, stage: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stage = stage
        self._loss_fn = loss_fn

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, more: dict[str, Any]
    ) -> Tensor:
        return self._loss_fn(self.stage(*args, **kwargs), target, **more)
