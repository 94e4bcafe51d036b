"""nn.Module -> FX graph by Dynamo, and the guards under which the graph stays right."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import warnings
from types import CodeType
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.convert_frame import CaptureOutput, fullgraph_capture, get_traced_fn
from torch._dynamo.functional_export import create_fx_graph_from_captured_output
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensorMode

from ..compat import tree_flatten, tree_unflatten
from ..errors import CaptureError
from .custom_functions import refuse_absent_gradients
from .reasons import definition

_DYNAMO = {
    # Dynamo remembers shapes by code object: a second nn.Sequential would get symbolic sizes.
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "allow_rnn": True,
    # What the forward does to Python is looked at below; the graph does not repeat it.
    "replay_side_effects": False,
    "side_effect_replay_policy": "warn",
    # A hook that is added after the capture must be noticed.
    "skip_nnmodule_hook_guards": False,
}
_SIDE_EFFECT = re.compile(r"\"([LG]\['[^\"]*)\"")
_TENSOR = "TENSOR_MATCH"


class PythonStateError(CaptureError):
    """The forward changes Python state, which a graph cannot repeat."""


class Guards:
    """Whether a captured graph still says what the module does.

    Dynamo specialises a graph on everything that the forward reads: attributes, dictionaries,
    globals, hooks, submodules. Its own guards check that. Tensors that are neither inputs nor
    state of the module are constants in the graph, so the very same object must still be where
    the forward finds it.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        captured: CaptureOutput,
    ) -> None:
        """Build the guards of ``module(*args, **kwargs)``.

        Raises:
            CaptureError: a constant requires a gradient, and nobody could hand it one.
        """
        output = captured.graph_capture_output
        self.module = module
        self._function, _ = get_traced_fn(module)
        self._signature = inspect.signature(self._function, follow_wrapped=False)
        self._manager = output.build_guards(self._function.__code__).guard_manager
        # When this code is collected, Dynamo removes globals that the guards read.
        self._code = output.bytecode
        tensors = [g.name for g in output.output_graph.guards if g.create_fn_name() == _TENSOR]
        self._constants = self._find_constants(tensors, args, kwargs)

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the graph may run for these inputs, with the module as it is now."""
        scope = self._scope(args, kwargs)
        return (
            scope is not None
            and bool(self._manager.check(scope["L"]))
            and all(eval(code, scope) is tensor for code, tensor in self._constants)
        )

    def _scope(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Variables as the guards name them; None where this is not a call of the function
        that was captured.
        """
        function, root = get_traced_fn(self.module)
        if function is not self._function:
            return None
        try:
            bound = self._signature.bind(*(() if root is None else (root,)), *args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        bound.arguments.update({name: cell.cell_contents for name, cell in cells})
        # An array is in the graph as a tensor over its memory.
        shared = {"___from_numpy": lambda array: array}
        return {"L": bound.arguments, "G": function.__globals__, **shared}

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


def export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, Guards]:
    """Dynamo's full-graph export, with guards.

    Raises:
        PythonStateError: the forward changes Python state.
    """
    options = {**_DYNAMO, "ignore_logging_functions": _messages()}
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(options):
        warnings.simplefilter("always")
        # The steps of torch's dynamo_graph_capture_for_export, which drops the guards.
        with (
            _compiling_state_context(),
            get_metrics_context(),
            dynamo_timed("fullgraph_capture"),
        ):
            captured = fullgraph_capture(module, args, kwargs)
            guards = Guards(module, args, kwargs, captured)
        exported = create_fx_graph_from_captured_output(captured, module, args, kwargs)
        refuse_absent_gradients(exported, captured.graph_capture_output.traced_code)
    # Dynamo put the graph into the globals of the forward's module, from where it would keep
    # the model and its example inputs alive for ever.
    output, graph = captured.graph_capture_output, captured.backend_input
    if graph is not None:
        output.f_globals.pop(graph.backend_id, None)
    _look_at_side_effects(caught, module, args, kwargs, output.f_globals)
    return exported, guards


def _look_at_side_effects(
    caught: list[warnings.WarningMessage],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: dict[str, Any],
) -> None:
    for warning in caught:
        text = str(warning.message)
        if "side effects" not in text:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
            continue
        sources = _SIDE_EFFECT.findall(text)
        lasting = [source for source in sources if source.startswith("L[")]
        # The dictionary behind **kwargs is made for the call and gone after it.
        own = {f"L['{name}']" for name in _catch_all(module)}
        lasting = [s for s in lasting if "._buffers" not in s and s not in own]
        outside = {name: eval(name, {"G": names}) for name in sources if name[:2] == "G["}
        outside = {name: value for name, value in outside.items() if not _is_context(value)}
        if not lasting and (outside or any("._buffers" in source for source in sources)):
            lasting = _left_behind(module, args, kwargs, outside)
        if lasting:
            name = type(module).__name__
            raise PythonStateError(
                f"{name}.forward (at {definition(module)}) changes Python state, "
                f"{', '.join(lasting)}, which a graph cannot repeat on every call. Keep such "
                "state outside of the forward, or in a buffer that is written in place."
            )


def _catch_all(module: nn.Module) -> list[str]:
    parameters = inspect.signature(get_traced_fn(module)[0], follow_wrapped=False).parameters
    return [name for name, p in parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD]


def _is_context(value: object) -> bool:
    """Whether the object is a ``ContextVar`` or does as one: what is set is reset before the
    call ends.
    """
    return all(callable(getattr(value, name, None)) for name in ("get", "set", "reset"))


def _messages() -> set[Any]:
    """``warnings.warn`` and every method of ``logging.Logger``, those that libraries add to it
    included: a message in the forward must not stand in the way of a graph.
    """
    names = (name for name in vars(logging.Logger) if not name.startswith("_"))
    methods = {method for name in names if callable(method := getattr(logging.Logger, name))}
    return {warnings.warn, *methods}


def _left_behind(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outside: dict[str, Any]
) -> list[str]:
    """Which of the objects ``outside`` the module a call leaves changed.

    Dynamo reports what is put back before the call ends (as ``with`` blocks do), and buffers
    that are written in place, which the graph does carry, in the same words as what lasts. So
    the forward runs once on a copy without data, and before and after are compared.

    Raises:
        CaptureError: the forward replaces a buffer by a new tensor; it would be lost.
    """
    attributes = {
        name: vars(value) for name, value in outside.items() if hasattr(value, "__dict__")
    }
    earlier = {name: dict(space) for name, space in attributes.items()}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        state = [*module.parameters(), *module.buffers()]
        memo: dict[int, Any] = {id(tensor): mode.from_tensor(tensor) for tensor in state}
        twin = copy.deepcopy(module, memo)
        before = dict(twin.named_buffers())
        leaves, spec = tree_flatten((args, kwargs))
        fakes = [mode.from_tensor(leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        fake_args, fake_kwargs = tree_unflatten(fakes, spec)
        twin(*fake_args, **fake_kwargs)
    replaced = [name for name, tensor in twin.named_buffers() if before.get(name) is not tensor]
    if replaced:
        raise CaptureError(
            f"{type(module).__name__}.forward replaces buffer {replaced[0]!r} by a new tensor "
            f"(at {definition(module)}); write into it instead, as in "
            "self.buffer.copy_(new) or self.buffer += 1"
        )
    changed = [name for name, space in attributes.items() if space != earlier[name]]
    for name in changed:
        attributes[name].clear()
        attributes[name].update(earlier[name])
    return [name for name in outside if name not in attributes or name in changed]
