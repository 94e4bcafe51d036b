"""``SplitPipelineStage``: a split module as a stage of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import CaptureError, PipelineError
from autosplit.passes import CollectiveCosts
from autosplit.runtime.build import SplitOptions
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.in_flight import (
    InFlightMicrobatches,
    MicrobatchState,
    StageBackward,
)
from autosplit.runtime.refusals import refuse_dtensors, refuse_overlap
from autosplit.runtime.residuals import State
from autosplit.runtime.specializations import CallSignature, Specializations, flatten
from autosplit.sharded import ShardedModule
from autosplit.torch_internals.autograd import without_autocast
from autosplit.torch_internals.distributed import average_gradients
from autosplit.torch_internals.pipelining_schedules import called_by_compile_check
from autosplit.torch_internals.pipelining_stage import RuntimeStage, TensorMeta
from autosplit.torch_internals.pytree import tree_unflatten

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

_MAX_GRAPHS = 64


class SplitPipelineStage(RuntimeStage):
    """A drop-in for ``torch.distributed.pipelining.PipelineStage`` whose backward is split in the
    graph: F, I, W and B are callables made from the module, and torch's schedules, sends and
    receives are as they are.

    Gradients are those of plain autograd, bit for bit where the same kernels run. What a step adds
    is summed apart, with a schedule's ``scale_grads`` divided, and added to ``.grad`` when all of
    its microbatches are done. Hooks of ``register_hook`` fire once for each microbatch.

    The graph is captured when torch agrees on shapes, before the first microbatch, and again where
    something that the module's forward reads has changed since, which is looked at once a step.
    Buffers are changed by microbatches only.

    A stage may return a tensor, a tuple, or any structure of tensors (a dictionary): the next
    stage gets a tuple as its arguments, and anything else as its one argument.

    Where ``fully_shard`` has sharded the module, parameters are gathered and freed where torch's
    schedule says, and gradients are reduced once a step.

    Attributes:
        functions: the graphs and their callables, those of the latest forward.
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
        *torchs: Any,
        backend: str = "eager",
        memory: str | int = "balanced",
        overlap: CollectiveCosts | None = None,
        **others: Any,
    ) -> None:
        """Arguments without a name are those of torch's stage, in its order.

        Args:
            submodule: the stage's module; of a split module, the module inside.
            stage_index: its place in the pipeline.
            num_stages: how many stages there are.
            device: where it runs.
            input_args: what the stage receives in a process group "fake", where no other rank can
                say it; else not used, as stages agree on shapes before the first microbatch.
            output_args: not used.
            torchs: what torch's stage takes after these, in the order of its version.
            backend: how graphs are run, see ``autosplit.split``.
            memory: what one microbatch holds, see ``autosplit.split``.
            overlap: what collectives take, see ``autosplit.split``.
            others: the same by name: ``group``, the ranks of the pipeline, all if there is none;
                ``dw_builder``, called as torch calls it: a runner that it returns at I runs after
                our W, at B both follow it. Gradients and meshes that it takes are not used.

        Raises:
            PipelineError: there is no process group.
            SplitError: an unknown backend or memory setting; lists the known ones.
            TypeError: an argument that torch's stage does not take.
        """
        del output_args  # in torch's place
        check_group()
        self.stage_index = stage_index  # the base class sets the module first
        self._options = SplitOptions(backend, memory, defer_whole_backward=True, overlap=overlap)
        # Of example arguments torch 2.11 makes a call of the module.
        place = (submodule, stage_index, num_stages, torch.device(device), None, None)
        super().__init__(*place, *torchs, **others)
        self._examples = (input_args,) if isinstance(input_args, Tensor) else input_args
        self._results: dict[SplitFunctions, Results] = {}
        self._step = StageStep(self)
        self._forget()

    @property
    def submod(self) -> nn.Module:
        """The stage's module as it was given; may be exchanged until a step begins, for one that
        has been parallelised.

        Raises:
            PipelineError: of the setter; it is no module.
        """
        # Parts that torch.compile has compiled are captured as they were before.
        return None if called_by_compile_check() else self._submodule  # type: ignore[return-value]

    @submod.setter
    def submod(self, module: nn.Module) -> None:
        self._module = unwrapped(module, self.stage_index)
        self._submodule = module
        self._owner = f"stage {self.stage_index} ({type(self._module).__name__})"
        self._saved = InFlightMicrobatches(self._owner, "its forward")
        self._weights = StageBackward(self._owner)
        self.sharding = ShardedModule(self._module)
        self._graphs = Specializations(
            self._module,
            self._options,
            computed=self.stage_index > 0,
            sharding=self.sharding,
        )

    def _forget(self) -> None:
        """Drop every microbatch in flight."""
        self._saved.clear()
        self._weights.clear()
        self._roots: dict[int, list[tuple[int, Tensor]]] = {}
        self._losses: dict[int, LossBoundary] = {}
        self._steady: dict[CallSignature, tuple[SplitFunctions, Results, State]] = {}
        self.dw_runner.clear()

    @property
    def functions(self) -> SplitFunctions:
        """The graphs and their callables, those of the latest forward."""
        return self._graphs.latest

    def parameters(self) -> list[Tensor]:
        """The module's, each once, as they are now."""
        found = {id(tensor): tensor for tensor in self._graphs.state().values()}
        return [tensor for tensor in found.values() if isinstance(tensor, nn.Parameter)]

    def clear_runtime_states(self) -> None:
        """Begin a step."""
        super().clear_runtime_states()
        self._forget()
        self._step.begin()

    def example_inputs(self) -> list[TensorMeta]:
        """What the stage receives, as ``input_args`` say; floating tensors need a gradient.

        Raises:
            PipelineError: it was made without.
        """
        if self._examples is None:
            raise PipelineError(
                f"{self._owner}: no other rank of a process group 'fake' says what this stage "
                "receives: give SplitPipelineStage(..., input_args=) tensors as of a microbatch"
            )
        metas = map(TensorMeta.of, self._examples)
        return [replace(meta, requires_grad=meta.dtype.is_floating_point) for meta in metas]

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool) -> Results:
        """Capture and compile the module for inputs like these, of the first microbatch or of
        another one: what it returns.
        """
        if first:
            refuse_unfit_call(self._owner, self._module, args, kwargs, first=self.is_first)
        self.sharding.look()
        functions = self._fitting(args, kwargs, *flatten(args, kwargs))
        made = self._results_of(functions)
        if not self.is_last:
            refuse_dtensors(self._owner, self._module, functions)
            made.refuse_objects(self._owner)
        if functions.has_backward:
            functions.compile(self._step.calls())
        return made

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """F: the result."""
        chunk, args, kwargs = fwd_chunk_id, self.arguments(fwd_chunk_id, args), kwargs or {}
        leaves, structure = flatten(args, kwargs)
        gathered = self.sharding.unshard()
        functions, made, state = self._step_graphs(args, kwargs, leaves, structure)
        del args
        if not self.is_last:
            made.refuse_other_shapes(self._owner, chunk, self.shapes.results[chunk])
        if functions.updated_inputs:
            refuse_overlap(functions, leaves, state)
        kept = self._kept_roots(chunk, functions, leaves, kwargs)
        with torch.no_grad():
            result = self._called("F", chunk, functions.run, state, leaves)
            written = result.outputs[len(result.outputs) - len(functions.updated_inputs) :]
            for name, value in zip(functions.updated_inputs, written, strict=True):
                if name in kept:
                    kept[name].copy_(value)
        outputs = result.outputs[: made.count]
        if self.has_backward:
            self._saved.put(chunk, MicrobatchState(functions, result.saved, state))
        if gathered and not self.has_backward:
            self.sharding.reshard()
        if not self.is_last:
            sent = made.sent(outputs)
            self.keep_for_send(chunk, sent)
            return tree_unflatten(made.filled(outputs, sent), made.spec)
        if functions.has_backward:
            boundary = self._losses[chunk] = LossBoundary(outputs, made.differentiable)
            outputs = boundary.outputs
        output = tree_unflatten(outputs, made.spec)
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
        """B, or I, which has the gradients of what was received."""
        if not self.has_backward:
            return
        chunk = bwd_chunk_id
        boundary = self._losses.pop(chunk, None)
        grads = [] if self.is_last else self.gradients(chunk)
        if boundary is not None:
            grads = boundary.gradients(loss)
        metas, flight = self.shapes.inputs[chunk], self._saved.take(chunk)
        found: Sequence[Tensor | None] = [None] * len(metas)
        if flight.functions.has_backward:
            arrived = self._results_of(flight.functions).arrived(grads)
            grads.clear()
            self.sharding.unshard()
            with torch.no_grad(), without_autocast():
                if full_backward:
                    found = self._called("B", chunk, self._weights.backward, flight, arrived)
                else:
                    found = self._called(
                        "I", chunk, self._weights.backward_input, chunk, flight, arrived
                    )
            self._hand_over()
            self._hand_to_roots(chunk, found)
        elif not full_backward:
            self._weights.in_flight.put(chunk, flight)
        if self.dw_builder:
            self.dw_runner[chunk] = self.dw_builder()
        if full_backward:
            self._after_weights(chunk, last_backward)
        self._send_back(chunk, metas, found)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """W."""
        if not self.has_backward:
            return
        self.sharding.unshard()
        with torch.no_grad(), without_autocast():
            self._called("W", bwd_chunk_id, self._weights.backward_weight, bwd_chunk_id)
        self._hand_over()
        self._after_weights(bwd_chunk_id, last_backward)

    def _after_weights(self, chunk: int, last: bool) -> None:
        """W of a microbatch has run, which may be the last of the step."""
        if chunk in self.dw_runner:
            self.dw_runner.pop(chunk)()
        if last:
            self._end()

    def _hand_over(self) -> None:
        """Let sharded parameters' gradients that are reduced in another dtype be added up in it."""
        if any(group.adds_in_another_dtype for group in self.sharding.groups):
            self._publish()

    def _publish(self) -> list[Tensor]:
        """Add the sums so far to ``.grad``; those of sharded parameters are divided later. Returns
        parameters with hooks that wait for that.
        """
        owner, divisor = self.sharding.owner, self._step.divisor
        hooked = self._weights.sums.publish(lambda p: divisor if owner(p) is p else 1)
        self.sharding.accumulate()
        return hooked

    def _end(self) -> None:
        """Every microbatch of the step was added: hand the sums over, have them averaged where data
        parallelism is to, and reduced where the schedule will not ask for that.
        """
        hooked = self._publish()
        if isinstance(self._submodule, DistributedDataParallel):
            average_gradients(self._submodule)
        if not self._step.reduces:
            self.start_gradient_reduction()
        self._step.call_hooks(hooked)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the step's gradients of sharded parameters, and divide them."""
        self.start_gradient_reduction()
        self.wait_for_gradient_reduction(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """The first half of it, which torch asks for by itself from 2.15 on."""
        self.sharding.reduce(self._step.divisor)
        self.sharding.reshard()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """The second half."""
        if grad_scale_factor != 1:
            self.scale_grads(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide what this step added to the gradients."""
        self._step.scale(grad_scale_factor)

    def _called(self, kind: str, chunk: int, run: Callable[..., T], *args: Any) -> T:
        """Run a graph; what it raises says where."""
        try:
            return run(*args)
        except Exception as error:
            failed = failed_call(f"{kind} of microbatch {chunk} of {self._owner}", error)
        raise failed

    def _send_back(
        self, chunk: int, metas: Sequence[TensorMeta], found: Sequence[Tensor | None]
    ) -> None:
        """Have gradients sent of what was received, as it lay in memory; zeros where one is waited
        for.
        """
        each = zip(found, metas, self.shapes.wanted, strict=False)
        self.bwd_cache[chunk] = tuple(
            [
                as_received(grad, meta, self.device) if is_wanted else None
                for grad, meta, is_wanted in each
            ]
        )

    def _hand_to_roots(self, chunk: int, found: Sequence[Tensor | None]) -> None:
        """Let autograd have the gradients of what the caller of ``step`` gave."""
        if chunk not in self._roots:
            return
        pairs = [(tensor, found[at]) for at, tensor in self._roots.pop(chunk)]
        wanted = [(tensor, grad) for tensor, grad in pairs if grad is not None]
        if wanted:
            torch.autograd.backward([t for t, _ in wanted], [g for _, g in wanted])

    def _kept_roots(
        self, chunk: int, functions: SplitFunctions, leaves: Sequence[Any], kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Inputs that the caller of ``step`` gave and the module writes into, by their paths; those
        that need a gradient are kept for the backward.
        """
        if not self.is_first and not kwargs:
            return {}
        received = 0 if self.is_first else len(leaves) - self._given_by_keyword(kwargs)
        named = enumerate(zip(functions.capture.inputs, leaves, strict=True))
        mine = [(at, name, leaf) for at, (name, leaf) in named if at >= received]
        if functions.has_backward:
            wanted = [(at, t) for at, _, t in mine if isinstance(t, Tensor) and t.requires_grad]
            if wanted:
                self._roots[chunk] = wanted
        written = functions.updated_inputs
        return {name: leaf for _, name, leaf in mine if name in written} if written else {}

    def _given_by_keyword(self, kwargs: dict[str, Any]) -> int:
        return len(flatten((), kwargs)[0]) if kwargs else 0

    def _step_graphs(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        structure: Hashable,
    ) -> tuple[SplitFunctions, Results, State]:
        """What runs a microbatch. Nobody changes a module between those of one step, so that it is
        looked at once for inputs of a kind; but the forward itself may write what decides.
        """
        signature = CallSignature.of(leaves, structure)
        found = self._steady.get(signature)
        if found is None:
            functions = self._fitting(args, kwargs, leaves, structure)
            found = functions, self._results_of(functions), self._graphs.state()
            plain = {Tensor}.issuperset(map(type, leaves)) and not self.sharding.groups
            if plain and not functions.updated_state:
                self._steady[signature] = found
        return found

    def _fitting(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        structure: Hashable,
    ) -> SplitFunctions:
        """The graphs for these inputs and the module as it is now.

        Raises:
            CaptureError: there is no such graph; names the line and what to do.
            PipelineError: an operator refuses the inputs.
            Exception: as the forward itself raises it.
        """
        with torch.set_grad_enabled(self.has_backward and torch.is_grad_enabled()):
            try:
                return self._graphs.fitting(args, kwargs, leaves, structure)
            except CaptureError as error:
                refused = error
        # Here, so that the user's own error comes alone.
        refuse_unfit_call(self._owner, self._module, args, kwargs, first=self.is_first)
        raise refused_capture(self._owner, leaves, refused)

    def _results_of(self, functions: SplitFunctions) -> Results:
        if functions not in self._results:
            if len(self._results) > 2 * _MAX_GRAPHS:
                self._results.clear()
            self._results[functions] = Results(functions)
        return self._results[functions]
