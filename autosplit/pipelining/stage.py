"""``SplitPipelineStage``: a split module as a stage of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import CaptureError, PipelineError
from autosplit.runtime.call_cache import CallCache
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.in_flight import (
    InFlightMicrobatches,
    MicrobatchState,
    StageBackward,
)
from autosplit.runtime.input_overlap import refuse_overlap
from autosplit.runtime.options import (
    OPTION_NAMES,
    SplitArguments,
    SplitOptions,
    split_options,
)
from autosplit.runtime.refusals import refuse_dtensors
from autosplit.runtime.specializations import BoundGraphs, ModuleCall, Specializations
from autosplit.sharded import ShardedModule
from autosplit.torch_internals.autograd import WithoutAutograd
from autosplit.torch_internals.distributed import average_gradients
from autosplit.torch_internals.pipelining_stage import RuntimeStage, StridedTensorMeta

from .refusals import (
    check_group,
    failed_call,
    refuse_unfit_call,
    refused_capture,
    unwrapped,
)
from .results import LossBoundary, Results, as_received
from .step import StageStep

T = TypeVar("T")


class PipelineStageArguments(SplitArguments, total=False):
    """Keyword arguments of ``SplitPipelineStage``: the options of splitting, and the arguments of
    torch's stage.
    """

    output_grads: Tensor | tuple[Tensor | None, ...] | None
    input_grads: Tensor | tuple[Tensor | None, ...] | None
    group: dist.ProcessGroup | None
    dw_builder: Callable[[], Callable[..., None]] | None
    get_mesh: Callable[..., Any] | None


class SplitPipelineStage(RuntimeStage):
    """A drop-in replacement for ``torch.distributed.pipelining.PipelineStage`` with a backward that
    is split at graph level.

    F, I, W and B are graphs of the module; torch's schedules, sends and receives are unchanged.

    Gradients equal those of plain autograd, bit for bit where the same kernels run. The gradients
    of a step are summed separately, divided under a schedule's ``scale_grads``, and added to
    ``.grad`` after all of its microbatches. Hooks of ``register_hook`` fire once per microbatch.

    The graph is captured when stages agree on shapes, before the first microbatch. It is captured
    again if something that the module's forward reads has changed, which is checked once a step.
    Shape agreement runs no forward, so only microbatches change buffers.

    A stage may return a tensor, a tuple, or any structure of tensors, such as a dictionary. A tuple
    is passed to the next stage as its arguments, any other structure as its only argument.

    If ``fully_shard`` has sharded the module, parameters are gathered and freed where torch's
    schedule says, and gradients are reduced once a step.

    Attributes:
        functions: F, I, W and B as used by the latest forward.
        sharding: gathers sharded parameters and reduces their gradients.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str | int,
        input_args: Tensor | tuple[Tensor, ...] | None = None,
        output_args: Tensor | tuple[Tensor, ...] | None = None,
        *torch_args: Any,
        options: SplitOptions | None = None,
        **keywords: Unpack[PipelineStageArguments],
    ) -> None:
        """Create a stage; positional arguments are those of torch's stage, in the same order.

        Args:
            submodule: the stage's module; a split module stands for the module inside.
            stage_index: the stage's index in the pipeline.
            num_stages: the number of stages.
            device: the device of the stage.
            input_args: example inputs, used only in a process group "fake", where no other rank
                sends shapes. Otherwise stages agree on shapes before the first microbatch.
            output_args: not used.
            torch_args: more positional arguments of torch's stage, in the order of the installed
                version.
            options: how the module is split and its graphs run; None: the defaults.
            keywords: fields of ``SplitOptions`` by name, and more arguments of torch's stage.
                ``group`` is the process group of the pipeline, by default all ranks. ``dw_builder``
                is called as torch calls it; the runner that it returns runs after this stage's W,
                or after B. Gradients and meshes among these arguments are not used.

        Raises:
            PipelineError: there is no process group.
            SplitError: an option has a wrong value.
            TypeError: an argument that torch's stage does not take.
        """
        del output_args  # part of torch's signature
        check_group()
        self.stage_index = stage_index  # the base class sets the module first
        torch_options: dict[str, Any] = {**keywords}
        changes = {key: torch_options.pop(key) for key in OPTION_NAMES & torch_options.keys()}
        self._options = split_options(options, changes).in_pipeline()
        # With example arguments, torch 2.11 would call the module.
        place = (submodule, stage_index, num_stages, torch.device(device), None, None)
        super().__init__(*place, *torch_args, **torch_options)
        self._examples = (input_args,) if isinstance(input_args, Tensor) else input_args
        self._results = CallCache[SplitFunctions, Results]()
        self._leaf = torch.zeros((), requires_grad=True)
        self._step = StageStep(self)
        self._drop_in_flight()

    def replace_module(self, module: nn.Module) -> None:
        """Replace the module, and with it all graphs and microbatches in flight.

        Raises:
            PipelineError: the value is no module.
        """
        self._module = unwrapped(module, self.stage_index)
        self._owner = f"stage {self.stage_index} ({type(self._module).__name__})"
        self._saved = InFlightMicrobatches(self._owner, "its forward")
        self._weights = StageBackward(self._owner, self._options.grad_dtype)
        self.sharding = ShardedModule(self._module)
        self._graphs = Specializations(
            self._module,
            self._options,
            computed=self.stage_index > 0,
            sharding=self.sharding,
        )

    def _drop_in_flight(self) -> None:
        """Drop every microbatch in flight."""
        self._saved.clear()
        self._weights.clear()
        self._weights_to_run: list[int] = []
        self._roots: dict[int, list[tuple[int, Tensor]]] = {}
        self._losses: dict[int, LossBoundary] = {}
        self._graphs.steady.clear()
        self.dw_runner.clear()

    @property
    def functions(self) -> SplitFunctions:
        """The graphs and their callables, as the latest forward used them."""
        return self._graphs.latest

    def parameters(self) -> list[Tensor]:
        """The module's current parameters, each once."""
        unique = {id(tensor): tensor for tensor in self._graphs.state().values()}
        return [tensor for tensor in unique.values() if isinstance(tensor, nn.Parameter)]

    def clear_runtime_states(self) -> None:
        """Drop the state of the last step, and begin a new step. Torch calls it."""
        super().clear_runtime_states()
        self._drop_in_flight()
        self._step.find_schedule()

    def example_inputs(self) -> list[StridedTensorMeta]:
        """Metadata of the stage's inputs, from ``input_args``. Floating-point inputs need a
        gradient.

        Raises:
            PipelineError: the stage was constructed without ``input_args``.
        """
        if self._examples is None:
            raise PipelineError(
                f"{self._owner}: in a process group 'fake', no other rank sends the shapes of its "
                "inputs. Pass SplitPipelineStage(..., input_args=) tensors of one microbatch"
            )
        metas = map(StridedTensorMeta.of, self._examples)
        return [replace(meta, requires_grad=meta.dtype.is_floating_point) for meta in metas]

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool) -> Results:
        """Capture and compile the module for inputs with these shapes and dtypes.

        Args:
            args: the positional arguments of a microbatch.
            kwargs: the keyword arguments.
            first: whether the microbatch is the first of the batch. Only the first microbatch's
                arguments are checked against the forward's signature.

        Returns:
            The outputs of the captured graph.
        """
        if first:
            refuse_unfit_call(self._owner, self._module, args, kwargs, first=self.is_first)
        self.sharding.find_groups()
        call = ModuleCall.of(args, kwargs, with_gradients=self.has_backward)
        functions = self._graphs_for(call)
        results = self._results_of(functions)
        if not self.is_last:
            refuse_dtensors(self._owner, self._module, functions)
            results.refuse_objects(self._owner)
        if functions.has_backward:
            functions.backward_graphs.compile_calls(self._step.calls(), self._options.grad_dtype)
        return results

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run F of a microbatch; returns its result."""
        chunk, args, kwargs = fwd_chunk_id, self.arguments(fwd_chunk_id, args), kwargs or {}
        call = ModuleCall.of(args, kwargs, with_gradients=self.has_backward)
        leaves = call.leaves
        gathered = self.sharding.unshard()
        functions, state, record = self._step_graphs(call)
        results = self._results_of(functions)
        del args, call
        if not self.is_last:
            results.refuse_other_shapes(self._owner, chunk, self.shapes.results[chunk])
        if functions.updated_inputs:
            refuse_overlap(functions, leaves, state)
        kept = self._keep_roots(chunk, functions, leaves, kwargs)
        with WithoutAutograd():
            result = self._call_graph("F", [chunk], functions.run, state, leaves, record)
            if kept:
                written = result.outputs[len(result.outputs) - len(functions.updated_inputs) :]
                for name, value in zip(functions.updated_inputs, written, strict=True):
                    if name in kept:
                        kept[name].copy_(value)
        outputs = result.outputs[: results.count]
        if self.has_backward:
            self._saved[chunk] = MicrobatchState(functions, result.saved, state)
        if gathered and not self.has_backward:
            self.sharding.reshard()
        if not self.is_last:
            sent = results.sent(outputs)
            self.keep_for_send(chunk, sent)
            return results.filled(outputs, sent)
        if functions.has_backward:
            boundary = LossBoundary(outputs, results.differentiable, self._leaf)
            self._losses[chunk], outputs = boundary, boundary.outputs
        output = results.unflatten(outputs)
        if save_forward_output:
            self.output_chunks.append(output)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run B or I of a microbatch; queues the gradients of its received inputs for sending."""
        if not self.has_backward:
            return
        chunk = bwd_chunk_id
        boundary = self._losses.pop(chunk, None)
        grads = [] if self.is_last else self.received_gradients(chunk)
        if boundary is not None:
            grads = boundary.compute_gradients(loss)
        metas, flight = self.shapes.inputs[chunk], self._saved.remove_state(chunk)
        input_grads: Sequence[Tensor | None] = [None] * len(metas)
        if flight.functions.has_backward:
            arrived = self._results_of(flight.functions).arrived(grads)
            grads.clear()
            self.sharding.unshard()
            with WithoutAutograd():
                run: Callable[..., list[Tensor | None]] = self._weights.backward_input
                if full_backward:
                    run = self._weights.backward
                kind = "B" if full_backward else "I"
                input_grads = self._call_graph(kind, [chunk], run, chunk, flight, arrived)
            if self.sharding.groups:
                self._publish_other_dtypes()
            self._backward_roots(chunk, input_grads)
        elif not full_backward:
            self._weights.in_flight[chunk] = flight
        if self.dw_builder:
            self.dw_runner[chunk] = self.dw_builder()
        if full_backward:
            self._after_weights(chunk, last_backward)
        self._queue_gradients(chunk, metas, input_grads)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run W of a microbatch. If the stage joins products, and its next W follows directly in
        the schedule, this W is deferred and runs together with the next W.
        """
        if not self.has_backward:
            return
        self._weights_to_run.append(bwd_chunk_id)
        if not last_backward and self._is_followed_by_weight(bwd_chunk_id):
            return
        chunks, self._weights_to_run = self._weights_to_run, []
        self.sharding.unshard()
        with WithoutAutograd():
            self._call_graph("W", chunks, self._weights.backward_weight, *chunks)
        if self.sharding.groups:
            self._publish_other_dtypes()
        for chunk in chunks:
            self._after_weights(chunk, last_backward and chunk == bwd_chunk_id)

    def _is_followed_by_weight(self, chunk: int) -> bool:
        if self.sharding.groups or chunk not in self._step.weights_that_wait():
            return False
        return self.functions.most_joined(self._options.grad_dtype) > 1

    def _after_weights(self, chunk: int, last: bool) -> None:
        """After W of microbatch ``chunk``, run torch's ``dw_runner``. After the last W, end the
        step.
        """
        if chunk in self.dw_runner:
            self.dw_runner.pop(chunk)()
        if last:
            self._end()

    def _publish_other_dtypes(self) -> None:
        """Add gradient sums of sharded parameters to ``.grad``, if their dtype differs from the
        parameters'.
        """
        if any(group.converts_gradients for group in self.sharding.groups):
            self._publish()

    def _publish(self) -> list[Tensor]:
        """Add the gradient sums to ``.grad``. Gradients of sharded parameters are divided later.

        Returns:
            Parameters with accumulate hooks to be called.
        """
        divisor, sums = self._step.divisor, self._weights.sums
        if divisor != 1:
            sums.divide(divisor, self.sharding.gathered_ids)
        hooked = sums.add_to_parameters()
        self.sharding.accumulate()
        return hooked

    def _end(self) -> None:
        """End the step after its last microbatch.

        Publish the gradients, average them over data-parallel ranks, and reduce sharded ones unless
        the schedule has a REDUCE_GRAD.
        """
        hooked = self._publish()
        if isinstance(self.submod, DistributedDataParallel):
            average_gradients(self.submod)
        if not self._step.reduces:
            self.start_gradient_reduction()
        self._step.call_hooks(hooked)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the step's gradients of sharded parameters, and divide them."""
        self.start_gradient_reduction()
        self.wait_for_gradient_reduction(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Reduce the gradients of sharded parameters; torch calls it from 2.15 on."""
        self.sharding.reduce(self._step.divisor)
        self.sharding.reshard()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Divide reduced gradients by the schedule's factor; torch calls it from 2.15 on."""
        if grad_scale_factor != 1:
            self.scale_grads(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients that this step has added to ``.grad``."""
        self._step.scale(grad_scale_factor)

    def _call_graph(self, kind: str, chunks: Sequence[int], run: Callable[..., T], *args: Any) -> T:
        """Run a graph. Its errors name the call of the graph, its microbatches and the stage."""
        try:
            return run(*args)
        except Exception as error:
            numbers = ", ".join(map(str, chunks))
            failed = failed_call(f"{kind} of microbatch {numbers} of {self._owner}", error)
        raise failed

    def _queue_gradients(
        self, chunk: int, metas: Sequence[StridedTensorMeta], input_grads: Sequence[Tensor | None]
    ) -> None:
        """Queue the gradients of received inputs, with the strides of the inputs.

        If the previous stage waits for a gradient that is None, zeros are sent.
        """
        rows = zip(input_grads, metas, self.shapes.wanted, strict=False)
        self.bwd_cache[chunk] = tuple(
            [
                as_received(grad, meta, self.device) if is_wanted else None
                for grad, meta, is_wanted in rows
            ]
        )

    def _backward_roots(self, chunk: int, input_grads: Sequence[Tensor | None]) -> None:
        """Continue the backward from the inputs that the caller of ``step`` passed, into the
        caller's autograd graph.
        """
        if chunk not in self._roots:
            return
        pairs = [(tensor, input_grads[at]) for at, tensor in self._roots.pop(chunk)]
        wanted = [(tensor, grad) for tensor, grad in pairs if grad is not None]
        if wanted:
            torch.autograd.backward([t for t, _ in wanted], [g for _, g in wanted])

    def _keep_roots(
        self, chunk: int, functions: SplitFunctions, leaves: Sequence[Any], kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Keep the caller's inputs that need a gradient, for the backward.

        Returns:
            The caller's inputs that the module writes into, by path.
        """
        if not self.is_first and not kwargs:
            return {}
        received = 0 if self.is_first else len(leaves) - self._count_by_keyword(kwargs)
        own_inputs = [*enumerate(leaves)][received:]
        if functions.has_backward:
            wanted = [(at, t) for at, t in own_inputs if isinstance(t, Tensor) and t.requires_grad]
            if wanted:
                self._roots[chunk] = wanted
        names, written = functions.capture.inputs, functions.updated_inputs
        return {names[at]: leaf for at, leaf in own_inputs if names[at] in written}

    def _count_by_keyword(self, kwargs: dict[str, Any]) -> int:
        return len(ModuleCall.of((), kwargs).leaves) if kwargs else 0

    def _step_graphs(self, call: ModuleCall) -> BoundGraphs:
        """The graphs for a microbatch, and the state with which they run.

        A module does not change between the microbatches of a step, so guards are checked once per
        input signature. They are checked for each microbatch if they read numbers, and the forward
        updates state.
        """
        graphs = self._graphs.steady.get(call.signature)
        if graphs is not None:
            return graphs
        plain = {Tensor}.issuperset(map(type, call.leaves))
        return self._graphs.bind(call.signature if plain else None, self._graphs_for(call))

    def _graphs_for(self, call: ModuleCall) -> SplitFunctions:
        """The graphs for these inputs and the module's current state.

        Raises:
            CaptureError: the module cannot be captured; names the line and what to do.
            PipelineError: an operator refuses the inputs.
            Exception: the error of the forward itself.
        """
        with torch.set_grad_enabled(self.has_backward and torch.is_grad_enabled()):
            try:
                return self._graphs.fitting(call)
            except CaptureError as error:
                refused = error
        # After the except block, so that the user's own error has no context.
        refuse_unfit_call(self._owner, self._module, call.args, call.kwargs, first=self.is_first)
        raise refused_capture(self._owner, call.leaves, refused)

    def _results_of(self, functions: SplitFunctions) -> Results:
        results = self._results.get(functions)
        return results or self._results.remember(functions, Results(functions))
