"""Stage: the functional face. F, I and W as calls on explicit state, without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .compat import StateReader
from .errors import CaptureError, SplitError
from .functions import SplitFunctions
from .handover import Handover, TensorSpec, distinct_bytes
from .tracing import trace, without_history


class Stage:
    """One pipeline stage: a module split for one shape of microbatch.

    Microbatches are keys; any number may be between F and I, and between I and W. Lists of
    tensors are handed over: a call empties the list it is given, so that tensors die at
    their last use inside the stage.

    Attributes:
        index: position in the pipeline.
        module: the module whose parameters and buffers are read, as they are at each call.
        functions: the graphs and their callables.
        gradients: parameter name -> gradient accumulated over microbatches, in the order in
            which W (or B) ran.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Tensor],
        *,
        index: int = 0,
        backend: str = "eager",
    ) -> None:
        """Trace ``module(*args)``; inputs with ``requires_grad`` get a gradient from I.

        Raises:
            CaptureError: the module cannot be traced, or returns something besides tensors.
            SplitError: the graph cannot be split, or the backend is unknown.
        """
        self.index = index
        self.module = module
        self.functions: SplitFunctions = trace(
            module, tuple(without_history(list(args))), {}, backend
        )
        self.gradients: dict[str, Tensor] = {}
        self._state = StateReader(module)
        self._saved: dict[int, Handover] = {}
        self._deferred: dict[int, Handover] = {}
        self._outputs = self.functions.capture.outputs
        missing = [name for name in self._outputs if name not in self.functions.output_specs]
        if missing:
            raise CaptureError(
                f"stage {index} ({type(module).__name__}) returns {missing[0]}, which is not a "
                "tensor; a stage hands only tensors to the next"
            )

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
            SplitError: this microbatch is already between F and its backward.
        """
        if microbatch in self._saved:
            raise SplitError(f"stage {self.index}: microbatch {microbatch} has run its forward")
        state = self._state()
        with torch.no_grad():
            result = self.functions.forward(state, list(_drain(inputs)))
            for name, value in zip(self.functions.updated_state, result.updates, strict=True):
                state[name].copy_(value)
        if self.functions.has_backward:
            self._saved[microbatch] = result.saved
        return result.outputs[: len(self._outputs)]

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """I: gradients of the inputs, None where none is needed; empties ``output_grads``.

        Raises:
            SplitError: this microbatch has no forward to go back through.
        """
        saved = self._take(self._saved, microbatch, "forward")
        with torch.no_grad():
            grads, self._deferred[microbatch] = self.functions.backward_input(
                saved, self._state(), self._named(output_grads)
            )
        return [grads.get(name) for name in self.functions.capture.inputs]

    def backward_weight(self, microbatch: int) -> None:
        """W: add this microbatch's weight gradients to ``gradients``.

        Raises:
            SplitError: this microbatch has nothing deferred.
        """
        deferred = self._take(self._deferred, microbatch, "backward_input")
        with torch.no_grad():
            self._accumulate(self.functions.backward_weight(deferred, self._state()))

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        """B: I and W in one unsplit call; empties ``output_grads``.

        Raises:
            SplitError: this microbatch has no forward to go back through.
        """
        saved = self._take(self._saved, microbatch, "forward")
        with torch.no_grad():
            grads, weights = self.functions.backward(
                saved, self._state(), self._named(output_grads)
            )
            self._accumulate(weights)
        return [grads.get(name) for name in self.functions.capture.inputs]

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
        state = self._state()
        for name, grad in self.gradients.items():
            parameter = state[name]
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.add_(grad)
        self.gradients = {}

    def reset(self) -> None:
        """Forget every microbatch in flight and the gradients gathered so far."""
        self._saved.clear()
        self._deferred.clear()
        self.gradients = {}

    def _named(self, output_grads: list[Tensor | None]) -> dict[str, Tensor | None]:
        names = self._outputs
        if len(output_grads) != len(names):
            raise SplitError(
                f"stage {self.index} has {len(names)} outputs, got {len(output_grads)} gradients"
            )
        return dict(zip(names, _drain(output_grads), strict=True))

    def _take(self, held: dict[int, Handover], microbatch: int, before: str) -> Handover:
        if microbatch not in held:
            raise SplitError(
                f"stage {self.index}: microbatch {microbatch} has not run {before}, or its "
                "result was used already"
            )
        return held.pop(microbatch)

    def _accumulate(self, grads: list[Tensor]) -> None:
        borrowed = self.functions.borrowed_gradients
        grads.reverse()
        for name in self.functions.parameter_names:
            grad = grads.pop()
            if name in self.gradients:
                self.gradients[name].add_(grad)
            elif name in borrowed:
                self.gradients[name] = grad.clone(memory_format=torch.contiguous_format)
            else:
                self.gradients[name] = grad


def _drain(items: list[Any]) -> list[Any]:
    taken = list(items)
    items.clear()
    return taken
