"""SplitModule: the autograd face. ``loss.backward()`` runs I, ``backward_weight()`` runs W."""

from __future__ import annotations

import os
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .compat import StateReader, share_state, tree_flatten, tree_unflatten
from .compile import check_backend
from .errors import SplitError
from .functions import SplitFunctions
from .guard import StepGuard
from .handover import Handover, distinct_bytes
from .report.dump import dump
from .report.tables import report
from .signature import Signature
from .tracing import trace, without_history


class _Pending(NamedTuple):
    """One microbatch between I and W; ``skipped`` names parameters that get no gradient."""

    functions: SplitFunctions
    deferred: Handover
    skipped: frozenset[str]


class SplitModule(nn.Module):
    """A module whose ``backward()`` stops at the input gradients.

    Calls, parameters, ``state_dict`` and ``train()``/``eval()`` are those of ``model``:
    the very same tensors under the same names. After ``loss.backward()`` the weight
    gradients of that microbatch are pending; ``backward_weight()`` computes them.

    One graph is kept for each combination of input shapes, dtypes, devices and
    ``requires_grad``, train/eval modes, grad mode and autocast; a new one is captured when a
    call needs it.
    """

    def __init__(self, model: nn.Module, *, backend: str = "eager") -> None:
        super().__init__()
        check_backend(backend)
        share_state(self, model)
        self.__dict__["model"] = model  # not a submodule: names keep no prefix
        self._backend = backend
        self._graphs: dict[Signature, list[SplitFunctions]] = {}
        self._pending: deque[_Pending] = deque()
        self._state = StateReader(model)
        self._guard = StepGuard(self)
        # Gives the outputs a gradient function although parameters are not its inputs.
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        Raises:
            CaptureError: the model cannot be traced for these inputs.
            SplitError: the graph cannot be split.
        """
        leaves, spec = tree_flatten((args, kwargs))
        functions = self._functions_for(args, kwargs, leaves, spec)
        if not functions.has_backward:
            outputs = self._run(functions, list(leaves)).outputs
        elif functions.tangent_specs:
            outputs = list(_Split.apply(self, functions, self._anchor, *leaves))  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                outputs = self._run(functions, list(leaves)).outputs
        for name in reversed(functions.updated_inputs):
            leaves[functions.capture.inputs.index(name)].copy_(outputs.pop())
        return tree_unflatten(outputs, functions.capture.output_spec)

    def backward_weight(self, microbatches: int | None = None) -> None:
        """Compute pending weight gradients and accumulate them into ``.grad``.

        They arrive through autograd: tensor hooks and post-accumulate hooks of the
        parameters fire, and gradients add up as after an ordinary ``backward()``.

        Args:
            microbatches: how many, the oldest ``backward()`` first; all where None.

        Raises:
            SplitError: nothing, or fewer than asked for, is pending.
        """
        count = self.pending if microbatches is None else microbatches
        if not self._pending:
            raise SplitError(
                "backward_weight() with nothing pending: call loss.backward() through this "
                "module first (each backward is one pending microbatch)"
            )
        if not 1 <= count <= self.pending:
            raise SplitError(
                f"backward_weight(microbatches={count}): {self.pending} pending; "
                f"ask for 1 to {self.pending}"
            )
        for _ in range(count):
            self._deliver(self._pending.popleft())
        if not self._pending:
            self._guard.lower()

    @property
    def pending(self) -> int:
        """Microbatches whose weight gradients have not been computed."""
        return len(self._pending)

    @property
    def pending_bytes(self) -> int:
        """Bytes of distinct storage that pending microbatches hold."""
        return distinct_bytes(t for each in self._pending for t in each.deferred.tensors)

    @property
    def functions(self) -> tuple[SplitFunctions, ...]:
        """F, I, W and B of every graph captured so far."""
        return tuple(each for known in self._graphs.values() for each in known)

    def capture(self, *args: Any, **kwargs: Any) -> SplitFunctions:
        """Capture the graph for inputs like these now, without running anything.

        Raises:
            CaptureError: the model cannot be traced for these inputs.
            SplitError: the graph cannot be split.
        """
        leaves, spec = tree_flatten((args, kwargs))
        return self._functions_for(args, kwargs, leaves, spec)

    def report(self) -> str:
        """Tables: per graph ops, FLOPs, bytes; the boundary between I and W, tensor by tensor.

        Raises:
            SplitError: nothing has been captured yet.
        """
        return report(self._latest(), type(self.model).__name__)

    def dump(self, folder: str | os.PathLike[str]) -> None:
        """Write the latest graphs as readable, runnable code, with boundary and drawing.

        Raises:
            SplitError: nothing has been captured yet.
        """
        dump(self._latest(), folder, type(self.model).__name__)

    def train(self, mode: bool = True) -> SplitModule:
        super().train(mode)
        self.model.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model" not in self.__dict__:
                raise
            return getattr(self.model, name)

    def _functions_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], spec: Any
    ) -> SplitFunctions:
        """The graph that fits the inputs and the model as they are now; captured if need be."""
        known = self._graphs.setdefault(Signature.of(self.model, leaves, spec), [])
        for functions in known:
            if functions.capture.guards.hold(args, kwargs):
                return functions
        examples, more = tree_unflatten(without_history(leaves), spec)
        known.append(trace(self.model, examples, more, self._backend))
        self._state = StateReader(self.model)
        return known[-1]

    def _latest(self) -> SplitFunctions:
        if not self.functions:
            raise SplitError(
                "nothing captured yet: call the module, capture(*inputs), or pass example "
                "inputs to autosplit.split(model, args)"
            )
        with_backward = [each for each in self.functions if each.has_backward]
        return (with_backward or list(self.functions))[-1]

    def _run(self, functions: SplitFunctions, leaves: list[Any]) -> Any:
        """F on the current state; new buffer values are written back."""
        state = self._state()
        result = functions.forward(state, leaves)
        with torch.no_grad():
            for name, value in zip(functions.updated_state, result.updates, strict=True):
                state[name].copy_(value)
        return result

    def _defer(self, pending: _Pending) -> None:
        self._pending.append(pending)
        self._guard.raise_for(pending.functions.parameter_names)

    def _deliver(self, pending: _Pending) -> None:
        """Run W inside autograd: what it returns goes to the parameters' accumulators."""
        state = self._state()
        names = [name for name in pending.functions.parameter_names if name not in pending.skipped]
        if names:
            parameters = [state[name] for name in names]
            with torch.enable_grad():
                root = _Deliver.apply(pending, state, *parameters)  # type: ignore[no-untyped-call]
            torch.autograd.backward(root)


class _Split(torch.autograd.Function):
    """F as autograd's forward, I as its backward."""

    @staticmethod
    def forward(
        ctx: Any, owner: SplitModule, functions: SplitFunctions, anchor: Tensor, *leaves: Any
    ) -> tuple[Any, ...]:
        result = owner._run(functions, list(leaves))
        ctx.owner, ctx.functions, ctx.saved = owner, functions, result.saved
        ctx.set_materialize_grads(False)
        constant = [
            value
            for name, value in zip(functions.output_names, result.outputs, strict=True)
            if isinstance(value, Tensor) and name not in functions.tangent_specs
        ]
        ctx.mark_non_differentiable(*constant)
        return tuple(result.outputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        functions: SplitFunctions = ctx.functions
        if torch.is_grad_enabled():
            raise SplitError(
                "create_graph=True: a split backward cannot be differentiated again; run the "
                "unsplit model where double backward is needed"
            )
        if ctx.saved is None:
            raise SplitError(
                "backward() a second time through the same output of a split module: what the "
                "forward saved is gone after the first. Call the module again, or sum the "
                "losses before one backward(); retain_graph=True is not supported"
            )
        named = dict(zip(functions.output_names, output_grads, strict=True))
        absent = {name for name, grad in named.items() if grad is None}
        skipped = frozenset(
            name for name, sources in functions.gradient_sources.items() if sources <= absent
        )
        del output_grads
        saved, ctx.saved = ctx.saved, None
        state = ctx.owner._state()
        grads, deferred = functions.backward_input(saved, state, named)
        ctx.owner._defer(_Pending(functions, deferred, skipped))
        return (None, None, None, *map(grads.get, functions.capture.inputs))


class _Deliver(torch.autograd.Function):
    """A root whose backward is W: the engine hands the gradients straight to the parameters."""

    @staticmethod
    def forward(ctx: Any, pending: _Pending, state: Any, *parameters: Tensor) -> Tensor:
        ctx.pending, ctx.state = pending, state
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        functions, deferred, skipped = ctx.pending
        grads = functions.backward_weight(deferred, ctx.state)
        pairs = zip(functions.parameter_names, grads, strict=True)
        return (None, None, *(grad for name, grad in pairs if name not in skipped))


def split(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    backend: str = "eager",
) -> SplitModule:
    """Split a model's backward into input gradients and weight gradients.

    Args:
        model: any ``nn.Module`` that can be captured in one graph.
        args: example positional inputs. With example inputs the graph is captured here;
            without, at the first call.
        kwargs: example keyword inputs.
        backend: how graphs are run; ``"eager"`` runs their operators one by one.

    Raises:
        CaptureError: the model cannot be traced for the example inputs; names the line.
        SplitError: the graph cannot be split, or the backend is unknown.
    """
    module = SplitModule(model, backend=backend)
    if args or kwargs:
        module.capture(*args, **(kwargs or {}))
    return module
