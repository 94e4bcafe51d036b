"""Stage: the functional face. F, I and W as calls on explicit state, without autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .accumulation import Accumulation, GradientSums
from .autograd import run_forward
from .compat import StateReader, without_autocast
from .errors import CaptureError, SplitError
from .functions import SplitFunctions
from .graphs import Graphs
from .handover import Handover, State, TensorSpec, distinct_bytes
from .signature import Signature
from .tracing import trace, without_history

_MAX_GRAPHS = 8


class _Flight(NamedTuple):
    """A microbatch between two calls: what the first left, and the state that F ran on."""

    functions: SplitFunctions
    handover: Handover
    state: State

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self.handover.tensors


class Stage:
    """One pipeline stage: a module split for one shape of microbatch.

    Microbatches are keys; any number may be between F and I, and between I and W. Lists of
    tensors are handed over: a call empties the list it is given, so that tensors die at
    their last use inside the stage.

    Where the module has changed since it was traced, in anything that its forward reads, the
    next forward traces it again, which takes seconds; its outputs must stay as they were.

    Attributes:
        index: position in the pipeline.
        module: the module whose parameters and buffers are read, as they are at each forward.
        functions: the graphs and their callables, those of the latest forward.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Tensor],
        *,
        index: int = 0,
        backend: str = "eager",
        memory: str | int = "balanced",
        accumulation: str = "exact",
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        """Trace ``module(*args)``; inputs with ``requires_grad`` get a gradient from I.

        Args:
            module: the stage.
            args: example inputs.
            index: position in the pipeline.
            backend: how graphs are run, see ``autosplit.split``.
            memory: what is held between the calls, see ``autosplit.split``.
            accumulation: how a microbatch's weight gradients join those before it. ``"exact"``
                adds whole gradients, bit for bit as autograd does; ``"fused"`` lets matrix
                products and embeddings add into the sum, which is faster and rounds differently.
            grad_dtype: in which dtype weight gradients are summed; None for each parameter's
                own. With ``torch.float32`` nothing of a bfloat16 gradient is lost in the sum;
                ``publish`` rounds it once (see there).

        Raises:
            CaptureError: the module cannot be traced, or returns something besides tensors.
            SplitError: the graph cannot be split, the backend or the memory setting is unknown,
                or a memory budget cannot be met.
        """
        self.index = index
        self.module = module
        self._backend = backend
        self._memory = memory
        self._specs = [TensorSpec.of(example) for example in args]
        self._blanks = tuple(map(_blank, args))
        self._grad_mode = torch.is_grad_enabled()
        self._graphs = Graphs(f"stage {index}", _MAX_GRAPHS)
        self.functions = self._trace(without_history(list(args)))
        self._sums = GradientSums(Accumulation(accumulation, grad_dtype))
        self._saved: dict[int, _Flight] = {}
        self._deferred: dict[int, _Flight] = {}
        self._outputs = self.functions.capture.outputs
        missing = [name for name in self._outputs if name not in self.functions.output_specs]
        if missing:
            raise CaptureError(
                f"stage {index} ({type(module).__name__}) returns {missing[0]}, which is not a "
                "tensor; a stage hands only tensors to the next"
            )

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Parameter name -> gradient added up over microbatches, in the order in which W (or B)
        ran. W of a later microbatch adds into these tensors in place.
        """
        return self._sums.tensors

    @property
    def output_specs(self) -> list[tuple[torch.Size, torch.dtype, bool]]:
        """Shape, dtype and whether a gradient comes back, of every output."""
        specs: dict[str, TensorSpec] = self.functions.output_specs
        differentiable = self.functions.tangent_specs
        return [
            (specs[name].shape, specs[name].dtype, name in differentiable) for name in self._outputs
        ]

    @property
    def saved_bytes(self) -> int:
        """Bytes of distinct storage held between F and I."""
        return distinct_bytes(t for each in self._saved.values() for t in each.tensors)

    @property
    def deferred_bytes(self) -> int:
        """Bytes of distinct storage held between I and W."""
        return distinct_bytes(t for each in self._deferred.values() for t in each.tensors)

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        """F: outputs for these inputs; empties ``inputs``.

        Raises:
            SplitError: this microbatch is already between F and its backward; an input is not
                as the stage was traced with it; or the module changed so that its outputs did.
            CaptureError: the module changed and cannot be traced any more.
        """
        if microbatch in self._saved:
            raise SplitError(f"stage {self.index}: microbatch {microbatch} has run its forward")
        self._check_inputs(inputs)
        functions = self.functions = self._fitting()
        state = self._state()
        with torch.no_grad():
            result = run_forward(functions, state, _drain(inputs))
        if functions.has_backward:
            self._saved[microbatch] = _Flight(functions, result.saved, state)
        return result.outputs[: len(self._outputs)]

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """I: gradients of the inputs, None where none is needed; empties ``output_grads``.

        Raises:
            SplitError: this microbatch has no forward to go back through.
        """
        functions, saved, state = self._take(self._saved, microbatch, "forward")
        with torch.no_grad(), without_autocast():
            grads, deferred = functions.backward_input(
                saved, self._output_grads(functions, output_grads)
            )
        self._deferred[microbatch] = _Flight(functions, deferred, state)
        return grads

    def backward_weight(self, microbatch: int) -> None:
        """W: add this microbatch's weight gradients to ``gradients``.

        Raises:
            SplitError: this microbatch has nothing deferred, or ran on other parameters than
                those before it.
        """
        functions, deferred, state = self._take(self._deferred, microbatch, "backward_input")
        with torch.no_grad(), without_autocast():
            sums = self._into(functions, state)
            gradients = functions.backward_weight(deferred, sums, self._sums.accumulation)
            self._keep(functions, sums, gradients)

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        """B: I and W in one unsplit call; empties ``output_grads``.

        Raises:
            SplitError: this microbatch has no forward to go back through.
        """
        functions, saved, state = self._take(self._saved, microbatch, "forward")
        with torch.no_grad(), without_autocast():
            sums = self._into(functions, state)
            grads, gradients = functions.backward(
                saved,
                self._output_grads(functions, output_grads),
                sums,
                self._sums.accumulation,
            )
            self._keep(functions, sums, gradients)
        return grads

    def publish(self) -> None:
        """Move ``gradients`` into the parameters' ``.grad``, adding to what is there.

        Raises:
            SplitError: a microbatch's weight gradients are still pending.
        """
        if self._deferred:
            waiting = ", ".join(map(str, sorted(self._deferred)))
            raise SplitError(
                f"stage {self.index}: weight gradients of microbatch {waiting} are pending; "
                "call backward_weight() for each first"
            )
        self._sums.publish()

    def reset(self) -> None:
        """Forget every microbatch in flight and the gradients gathered so far."""
        self._saved.clear()
        self._deferred.clear()
        self._sums.clear()

    def _fitting(self) -> SplitFunctions:
        """The graphs of the module as it is now."""
        with torch.set_grad_enabled(self._grad_mode):
            key = Signature.of(list(self._blanks), None)
            found = self._graphs.find(key, lambda f: f.capture.guards.hold(self._blanks, {}))
            if found is not None:
                return found
            specs = self.output_specs
            examples = [
                spec.zeros().requires_grad_(blank.requires_grad)
                for spec, blank in zip(self._specs, self._blanks, strict=True)
            ]
            found = self._trace(examples)
        before, self.functions = self.functions, found
        if found.capture.outputs != self._outputs or self.output_specs != specs:
            self.functions = before
            raise SplitError(
                f"stage {self.index} ({type(self.module).__name__}) was changed so that it "
                "returns something else than it was set up with; build a new Stage"
            )
        return found

    def _trace(self, args: list[Tensor]) -> SplitFunctions:
        functions = trace(self.module, tuple(args), {}, self._backend, self._memory)
        self._graphs.add(Signature.of(list(self._blanks), None), functions)
        self._state = StateReader(self.module)
        return functions

    def _check_inputs(self, inputs: list[Tensor]) -> None:
        if len(inputs) != len(self._specs):
            raise SplitError(
                f"stage {self.index} takes {len(self._specs)} inputs, got {len(inputs)}"
            )
        for position, (given, spec) in enumerate(zip(inputs, self._specs, strict=True)):
            if (given.shape, given.dtype, given.device) != (spec.shape, spec.dtype, spec.device):
                raise SplitError(
                    f"stage {self.index}: input {position} must be {spec.dtype} "
                    f"{list(spec.shape)} on {spec.device}, got {given.dtype} "
                    f"{list(given.shape)} on {given.device}"
                )
            inputs[position] = spec.conform(given)

    def _into(self, functions: SplitFunctions, state: State) -> list[Tensor] | None:
        """The sums that W or B adds into; None where it makes new gradients."""
        names = functions.parameter_names
        try:
            return self._sums.into(names, [state[name] for name in names])
        except SplitError as error:
            raise SplitError(f"stage {self.index}: {error}") from None

    def _keep(
        self,
        functions: SplitFunctions,
        sums: list[Tensor] | None,
        gradients: Sequence[Tensor],
    ) -> None:
        """Gather the gradients, unless they were added into ``sums``."""
        if sums is None:
            borrowed = functions.borrowed_gradients
            self._sums.add(functions.parameter_names, gradients, borrowed)

    def _output_grads(
        self, functions: SplitFunctions, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """One for each output of F, in a list that nobody else holds."""
        names = self._outputs
        if len(output_grads) != len(names):
            raise SplitError(
                f"stage {self.index} has {len(names)} outputs, got {len(output_grads)} gradients"
            )
        return _drain(output_grads) + [None] * len(functions.updated_inputs)

    def _take(self, held: dict[int, _Flight], microbatch: int, before: str) -> _Flight:
        if microbatch not in held:
            raise SplitError(
                f"stage {self.index}: microbatch {microbatch} has not run {before}, or its "
                "result was used already"
            )
        return held.pop(microbatch)


def _drain(items: list[Any]) -> list[Any]:
    taken = list(items)
    items.clear()
    return taken


def _blank(example: Tensor) -> Tensor:
    """As the example, without memory: guards look only at what kind of tensor an input is."""
    spec = TensorSpec.of(example)
    blank = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    blank.untyped_storage().resize_(0)
    return blank.requires_grad_(example.requires_grad)
