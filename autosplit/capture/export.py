"""Dynamo's full-graph export of a module, and the guards under which the graph is valid."""

from __future__ import annotations

import builtins
import logging
import re
import warnings
from collections import ChainMap
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import CaptureOutput, fullgraph_capture, get_traced_fn
from torch._dynamo.functional_export import create_fx_graph_from_captured_output
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._export.utils import _compiling_state_context

from autosplit.capture.effects.observers import is_observed, unobserved
from autosplit.capture.effects.python_random import refuse_drawn
from autosplit.capture.effects.side_effects import Setter, setters
from autosplit.capture.workarounds.causal_mask import MaskDecision, masks_decided
from autosplit.capture.workarounds.custom_functions import refuse_absent_gradients
from autosplit.capture.workarounds.eager_settings import AS_IN_EAGER
from autosplit.capture.workarounds.graph_modules import graph_put_aside
from autosplit.capture.workarounds.long_loops import unrolling_limited
from autosplit.capture.workarounds.output_hooks import install_output_hooks
from autosplit.capture.workarounds.tensor_hooks import refuse_lost_hooks
from autosplit.capture.workarounds.trace_log_headers import without_trace_log_headers
from autosplit.errors import CaptureError
from autosplit.torch_internals.pytree import tree_flatten
from autosplit.torch_internals.version import TORCH

from .argument_binding import Binding
from .diagnosis import definition
from .input_sizes import is_open

_DYNAMO = {
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
_TENSOR = "TENSOR_MATCH"


class Guards:
    """Validity of a captured graph for the module as it is now.

    Dynamo specialises a graph on everything that the forward reads: attributes, dictionaries,
    globals, hooks, submodules. Its own guards check that. Tensors that are neither inputs nor
    state of the module are constants in the graph, so the very same object must still be where
    the forward finds it. What was decided by values of tensors must be decided so again. And what
    the forward would set must be set already.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        captured: CaptureOutput,
        answers: Sequence[MaskDecision] = (),
    ) -> None:
        """Build the guards of ``module(*args, **kwargs)``.

        Raises:
            CaptureError: a constant requires a gradient, and nobody could hand it one.
        """
        output = captured.graph_capture_output
        self.module = module
        self._function, _ = get_traced_fn(module)
        self._binding = Binding(self._function)
        self._unsettled: CaptureOutput | None = captured
        self._manager: Any = None
        self._open = is_open(args, kwargs)
        if not self._open:
            self.settle()
        # When this code is collected, Dynamo removes globals that the guards read.
        self._code = output.bytecode
        tensors = [g.name for g in output.output_graph.guards if g.create_fn_name() == _TENSOR]
        self._constants = self._find_constants(tensors, args, kwargs)
        self._answers = tuple(answers)
        self.setters: list[Setter] = []

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
            torch._dynamo.config.patch(_DYNAMO),
        ):
            self._manager = output.build_guards(self._function.__code__).guard_manager
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
        scope = self._scope(args, kwargs)
        return (
            scope is not None
            and bool(self._manager.check(scope["L"]))
            and all(eval(code, scope) is tensor for code, tensor in self._constants)
            and all(setter.holds() for setter in self.setters)
            and all(answer.holds(scope) for answer in self._answers)
        )

    def _scope(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Variables as the guards name them; None where this is not a call of the function
        that was captured.
        """
        function, root = get_traced_fn(self.module)
        if function is not self._function:
            return None
        bound = self._binding(args if root is None else (root, *args), kwargs)
        if bound is None:
            return None
        if function.__closure__:
            cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
            bound.update({name: cell.cell_contents for name, cell in cells})
        return {"L": bound, "G": function.__globals__, "___from_numpy": _same}

    def _find_constants(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[CodeType, Any]]:
        scope = self._scope(args, kwargs)
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


def _same(array: Any) -> Any:
    """An array is in the graph as a tensor over its memory."""
    return array


def export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, by_value: bool = False
) -> tuple[fx.GraphModule, Guards]:
    """Dynamo's full-graph export, with guards. A forward that asks is told that it is exported,
    and where that has it unroll a long loop, that it is compiled.

    Args:
        module: what to export.
        args: example positional inputs.
        kwargs: example keyword inputs.
        by_value: whether the graph may be for the values of the examples, where the guards can
            tell (``by_value``): for a caller that asks them before each call with its inputs.

    Raises:
        PythonStateError: the forward changes Python state.
        CaptureError: what the forward reads or draws cannot be in a graph.
    """
    try:
        return _export_short(module, args, kwargs, by_value)
    except Exception as error:
        if not install_output_hooks(module, error):
            raise
    return _export_short(module, args, kwargs, by_value)


def _export_short(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], by_value: bool
) -> tuple[fx.GraphModule, Guards]:
    """Without a loop that is unrolled too far, where the forward knows another way."""
    with unrolling_limited() as limit, _compiling_state_context():
        try:
            return _export(module, args, kwargs, by_value)
        except Exception:
            if limit.line is None:
                raise
    return _export(module, args, kwargs, by_value)


def _export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], by_value: bool
) -> tuple[fx.GraphModule, Guards]:
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(_DYNAMO):
        warnings.simplefilter("always")
        # The steps of torch's dynamo_graph_capture_for_export, which drops the guards.
        with (
            get_metrics_context(),
            dynamo_timed("fullgraph_capture"),
            without_trace_log_headers(),
            # Inside: what torch 2.11 notes of a capture when it ends cannot hold functions.
            torch._dynamo.config.patch(ignore_logging_functions=_messages()),
        ):
            with refuse_lost_hooks(), masks_decided(by_value) as answers:
                captured = fullgraph_capture(module, args, kwargs)
            guards = Guards(module, args, kwargs, captured, answers)
        _return_something(captured)
        with graph_put_aside(module, captured.backend_input):
            exported = create_fx_graph_from_captured_output(captured, module, args, kwargs)
        refuse_absent_gradients(exported, captured.graph_capture_output.traced_code)
    _find_class_tensors(module, exported)
    if TORCH < (2, 12):
        _find_builtins(exported)
    refuse_drawn(module, exported)
    # Dynamo put the graph into the globals of the forward's module, from where it would keep
    # the model and its example inputs alive for ever.
    output, made = captured.graph_capture_output, captured.backend_input
    if made is not None:
        output.f_globals.pop(made.backend_id, None)
    guards.setters = setters(module, args, kwargs, caught, output.f_globals)
    return exported, guards


def _return_something(captured: CaptureOutput) -> None:
    """Give a graph without results one, as torch writes no valid code for it: the graph of a module
    that returns views of its parameters only.
    """
    if captured.backend_input is None:
        return
    graph = captured.backend_input.graph_module.graph
    output, taken = graph.output_node(), graph.find_nodes(op="placeholder")
    if not output.args[0] and taken:
        output.args = ((taken[0],),)


def _find_class_tensors(module: nn.Module, exported: Any) -> None:
    """Let the generated code find tensors that are attributes of the module's class: the exported
    module has a class of its own, so the user's module stands in.
    """
    _, root = get_traced_fn(module)
    if any(
        isinstance(value, Tensor) for kind in type(root).__mro__ for value in vars(kind).values()
    ):
        exported.graph._codegen.dynamo_bytecode_flatten.input_processor.root = root


def _find_builtins(exported: Any) -> None:
    """Add builtins to the globals of the code that flattens inputs and results, where torch 2.11
    looks for them.
    """
    codegen = exported.graph._codegen
    for half in (codegen.dynamo_bytecode_flatten, codegen.dynamo_bytecode_unflatten):
        half.f_globals = ChainMap(half.f_globals, vars(builtins))


def _messages() -> set[Any]:
    """Functions for Dynamo to ignore: ``warnings.warn`` and every method of ``logging.Logger``,
    those that libraries add included.
    """
    names = (name for name in vars(logging.Logger) if not name.startswith("_"))
    methods = {method for name in names if callable(method := getattr(logging.Logger, name))}
    return {warnings.warn, *methods}
