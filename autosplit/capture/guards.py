"""``Guards``: whether a captured graph still fits its module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.convert_frame import CaptureOutput, get_traced_fn
from torch._dynamo.utils import dynamo_timed, get_metrics_context

from autosplit.capture.effects.observers import is_observed, unobserved
from autosplit.capture.effects.side_effects import Setter
from autosplit.capture.workarounds.causal_mask import MaskDecision
from autosplit.capture.workarounds.eager_settings import AS_IN_EAGER
from autosplit.errors import CaptureError
from autosplit.torch_internals.pytree import tree_flatten

from .diagnosis import definition
from .forward_scope import ForwardScope
from .input_sizes import is_open

DYNAMO = {
    # Dynamo remembers shapes by code object: a second nn.Sequential would get symbolic sizes.
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "allow_rnn": True,
    # What the forward does to Python is looked at afterwards; the graph does not repeat it.
    "replay_side_effects": False,
    "side_effect_replay_policy": "warn",
    # A hook that is added after the capture must be noticed.
    "skip_nnmodule_hook_guards": False,
    **AS_IN_EAGER,
}
"""Settings of Dynamo under which modules are captured, and guards built."""
_TENSOR = "TENSOR_MATCH"


class BlockGuards:
    """Guards of a block that a captured graph calls, and of its call there.

    Args:
        guards: of the graphs that are called; nothing but Dynamo's own.
        module: the block.
        args: positional inputs like those of the call.
        kwargs: keyword inputs likewise.
    """

    def __init__(
        self, guards: Guards, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.guards = guards
        self._scope = ForwardScope(module)
        self._variables = (self._scope.of(args, kwargs) or {}).get("L")

    def hold(self) -> bool:
        """Whether the graphs may be called for the block as it is now."""
        return self._scope.is_current and self.guards.hold_for(self._scope, self._variables)


class Guards:
    """Validity of a captured graph for the module as it is now.

    Dynamo specialises a graph on everything that the forward reads: attributes, dictionaries,
    globals, hooks, submodules. Its own guards check that. Tensors that are neither inputs nor
    state of the module are constants in the graph, so the very same object must still be where
    the forward finds it. What was decided by values of tensors must be decided so again. And what
    the forward would set must be set already.

    Args:
        module: that was captured.
        captured: what Dynamo made of it.
        varies: whether sizes are left open.
    """

    def __init__(self, module: nn.Module, captured: CaptureOutput, varies: bool) -> None:
        self.module = module
        self._scope = ForwardScope(module)
        self._manager: Any = None
        # When this code is collected, Dynamo removes globals that the guards read.
        self._kept = captured.graph_capture_output.bytecode
        self._unsettled: CaptureOutput | None = captured
        self._open = varies
        self._constants: list[tuple[CodeType, Any]] = []
        self._answers: tuple[MaskDecision, ...] = ()
        self.setters: list[Setter] = []
        self.blocks: list[BlockGuards] = []

    @classmethod
    def of(
        cls,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        captured: CaptureOutput,
        answers: Sequence[MaskDecision] = (),
    ) -> Guards:
        """The guards of ``module(*args, **kwargs)``, which Dynamo captured.

        Raises:
            CaptureError: a constant requires a gradient, and nobody could hand it one.
        """
        output = captured.graph_capture_output
        made = cls(module, captured, is_open(args, kwargs))
        if not made._open:
            made.settle()
        tensors = [g.name for g in output.output_graph.guards if g.create_fn_name() == _TENSOR]
        made._constants = made._find_constants(tensors, args, kwargs)
        made._answers = tuple(answers)
        return made

    @property
    def only_dynamos(self) -> bool:
        """Whether nothing is asked but Dynamo's own guards."""
        return not (self._constants or self._answers or self.setters)

    def hold_for(self, scope: ForwardScope, variables: dict[str, Any] | None) -> bool:
        """Whether Dynamo's own guards hold for another module, by the variables of its forward."""
        same = scope.function is self._scope.function and variables is not None
        return same and bool(self._manager.check(variables))

    def variables(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Variables of the forward in one call, as guards name them."""
        return self._scope.of(args, kwargs)

    def settle(self) -> None:
        """Take up what was assumed about sizes so far. Where sizes are open, tracing and passes
        assume more after Dynamo's capture, so this comes behind them; what would be assumed later
        is refused.
        """
        if self._unsettled is None:
            return
        output, self._unsettled = self._unsettled.graph_capture_output, None
        with (
            get_metrics_context(),
            dynamo_timed("build_guards"),
            torch._dynamo.config.patch(DYNAMO),
        ):
            self._manager = output.build_guards(self._scope.function.__code__).guard_manager
        sizes = output.output_graph.shape_env
        if self._open and sizes is not None:
            vars(sizes)["_error_on_new_guards"] = True

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the graph may run for these inputs, with the module as it is now."""
        if not is_observed():
            return self._hold(args, kwargs)
        with unobserved():
            return self._hold(args, kwargs)

    def name_of(self, constant: Tensor) -> str | None:
        """Path of a constant of the graph from the forward; None for one that tracing made."""
        for code, tensor in self._constants:
            if tensor is constant:
                path = code.co_filename.removeprefix("L['self'].")
                return re.sub(r"_modules\['([^']*)'\]", r"\1", path)
        return None

    def _hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        scope = self._scope.of(args, kwargs)
        return (
            scope is not None
            and bool(self._manager.check(scope["L"]))
            and all(eval(code, scope) is tensor for code, tensor in self._constants)
            and all(setter.holds() for setter in self.setters)
            and all(answer.holds(scope) for answer in self._answers)
            and all(block.hold() for block in self.blocks)
        )

    def _find_constants(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[CodeType, Any]]:
        scope = self._scope.of(args, kwargs)
        known = {id(leaf) for leaf in tree_flatten((args, kwargs))[0]}
        _, root = get_traced_fn(self.module)
        if root is self.module:
            # State that the forward reads through a closure instead would be a constant.
            known |= {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        found = []
        for name in names:
            code = compile(name, name, "eval")
            value = eval(code, scope)
            if id(value) in known:
                continue
            if getattr(value, "requires_grad", False):
                raise CaptureError(
                    f"{type(self.module).__name__}.forward (at {definition(self.module)}) reads "
                    f"{name}, a tensor that requires a gradient but is neither an input nor a "
                    "parameter; register it as nn.Parameter, or pass it in"
                )
            found.append((code, value))
        return found
