"""``Guards``: whether a captured graph still fits its module; ``BlockGuards``, one of its blocks.

Before these: ``unobserved``, as a graph is the same whoever watches; ``ForwardScope``, the
variables of a forward as Dynamo's guards name them.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.convert_frame import CaptureOutput, get_traced_fn
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch.nn.modules import module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.module_tracker import ModuleTracker

from autosplit.capture.diagnosis import forward_of
from autosplit.capture.input_sizes import is_open
from autosplit.capture.side_effects import Setter
from autosplit.capture.workarounds.operators import AS_IN_EAGER
from autosplit.errors import CaptureError
from autosplit.torch_internals.pytree import tree_flatten

# The other global hooks on modules may do anything; they are part of what is captured.
_HOOKS: tuple[dict[int, Any], ...] = (
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
)
_ALL_HOOKS = (*_HOOKS, module._global_backward_pre_hooks, module._global_backward_hooks)
_TRACKERS = {ModuleTracker._fw_pre_hook, ModuleTracker._fw_post_hook}


def _tracked() -> bool:
    """Whether a module tracker is on."""
    return any(_is_tracker(hook) for hooks in _HOOKS for hook in hooks.values())


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Context without dispatch modes and module trackers."""
    with _untracked(), _disable_current_modes():
        yield


@contextlib.contextmanager
def _untracked() -> Iterator[None]:
    """Remove trackers' hooks, and restore them in their order among the others."""
    originals = [dict(hooks) for hooks in _HOOKS]
    for hooks, original in zip(_HOOKS, originals, strict=True):
        for key in [key for key, hook in original.items() if _is_tracker(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        # The dictionaries stay the same objects: handles of hooks know them by weak reference.
        for hooks, original in zip(_HOOKS, originals, strict=True):
            added = {key: hook for key, hook in hooks.items() if key not in original}
            hooks.clear()
            hooks.update(original | added)


def _is_tracker(hook: Any) -> bool:
    return getattr(hook, "__func__", None) in _TRACKERS


_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_PLAIN = {inspect.Parameter.POSITIONAL_OR_KEYWORD, _KEYWORD_ONLY}


def traced_call(module: nn.Module, args: tuple[Any, ...]) -> tuple[FunctionType, tuple[Any, ...]]:
    """The function that Dynamo traces for a call of a module, and its positional arguments."""
    forward = module.forward
    if (  # as a rule: what get_traced_fn asks, in a third of its time, as every call comes here
        type(forward) is MethodType
        and forward.__self__ is module
        and type(module).__call__ is nn.Module.__call__
        and not (
            module._forward_pre_hooks
            or module._forward_hooks
            or module._backward_pre_hooks
            or module._backward_hooks
            or any(_ALL_HOOKS)
        )
    ):
        return forward.__func__, (module, *args)  # type: ignore[return-value]
    function, root = get_traced_fn(module)
    return function, args if root is None else (root, *args)


class ForwardScope:
    """Variables of a function that Dynamo traces: its parameters, what it closes over, and its
    globals.

    Binds as ``inspect.Signature.bind`` with defaults applied does, without its cost (ten
    microseconds a call) for functions that take no ``*args``, no ``**kwargs`` and nothing by
    position only.

    Attributes:
        function: that is traced.
    """

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self._signature = inspect.signature(function, follow_wrapped=False)
        parameters = self._signature.parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        self._is_plain = set(kinds.values()) <= _PLAIN
        self._names = parameters.keys()
        self._positional = [n for n, kind in kinds.items() if kind is not _KEYWORD_ONLY]
        self._defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """What it finds locally in one call; None where it cannot be called like this."""
        if self._is_plain and len(args) <= len(self._positional):
            arguments = dict(zip(self._positional, args, strict=False))
            arguments.update(kwargs)
            bound = self._defaults | arguments
            if len(arguments) < len(args) + len(kwargs) or bound.keys() != self._names:
                return None
        else:
            try:
                slowly = self._signature.bind(*args, **kwargs)
            except TypeError:
                return None
            slowly.apply_defaults()
            bound = slowly.arguments
        if self.function.__closure__:
            names = self.function.__code__.co_freevars
            cells = zip(names, self.function.__closure__, strict=True)
            bound.update({name: cell.cell_contents for name, cell in cells})
        return bound

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Variables of one call."""
        bound = self.bound(args, kwargs) or {}
        return {"L": bound, "G": self.function.__globals__, "___from_numpy": _same}


def _same(array: Any) -> Any:
    """An array is in the graph as a tensor over its memory."""
    return array


DYNAMO = {
    # Dynamo remembers shapes by code object: a second nn.Sequential would get symbolic sizes.
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    # A function's backward may ask autograd for gradients.
    "trace_autograd_ops": True,
    # What the forward does to Python is looked at afterwards; the graph does not repeat it.
    "replay_side_effects": False,
    # Asked in C++, as from torch 2.15 on.
    "use_lamba_guard_for_object_aliasing": False,
    "side_effect_replay_policy": "silent",
    **AS_IN_EAGER,
}
"""Settings of Dynamo under which modules are captured, and guards built."""
_TENSOR = "TENSOR_MATCH"
_SAVED_TENSORS_HOOKS = "AUTOGRAD_SAVED_TENSORS_HOOKS"


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
        self.guards, self._module = guards, module
        self._function = guards.scope.function
        function, positional = traced_call(module, args)
        self._variables = ForwardScope(function).bound(positional, kwargs)

    def hold(self) -> bool:
        """Whether the graphs may be called for the block as it is now."""
        if traced_call(self._module, ())[0] is not self._function or self._variables is None:
            return False
        return bool(self.guards.check(self._variables))


class Guards:
    """Validity of a captured graph for the module as it is now.

    Dynamo specialises a graph on everything that the forward reads: attributes, dictionaries,
    globals, hooks, submodules. Its own guards check that. Tensors that are neither inputs nor
    state of the module are constants in the graph, so the very same object must still be where
    the forward finds it. And what the forward would set must be set already.

    Args:
        module: that was captured.
        captured: what Dynamo made of it.
        varies: whether sizes are left open.

    Attributes:
        scope: variables of its forward.
        check: asks Dynamo's own guards of the variables of one call; there once this is settled.
        check_globals: asks those of globals alone, the same for every block of a kind.
    """

    check: Callable[[dict[str, Any]], bool]
    check_globals: Callable[[dict[str, Any]], bool]

    def __init__(self, module: nn.Module, captured: CaptureOutput, varies: bool) -> None:
        self.module = module
        self.scope = ForwardScope(get_traced_fn(module)[0])
        # When this code is collected, Dynamo removes globals that the guards read.
        self._kept = captured.graph_capture_output.bytecode
        self._unfrozen: CaptureOutput | None = captured
        self._open = varies
        self._constants: list[tuple[CodeType, Any]] = []
        self.setters: list[Setter] = []
        self.blocks: list[BlockGuards] = []

    @cached_property
    def _checks(self) -> set[Callable[[dict[str, Any]], bool]]:
        """Of globals: these guards' and those of each kind of block."""
        return {guards.check_globals for guards in (self, *(block.guards for block in self.blocks))}

    @classmethod
    def of(
        cls,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        captured: CaptureOutput,
    ) -> Guards:
        """The guards of ``module(*args, **kwargs)``, which Dynamo captured.

        Raises:
            CaptureError: a constant requires a gradient, and nobody could hand it one.
        """
        output = captured.graph_capture_output
        guards = cls(module, captured, is_open(args, kwargs))
        if not guards._open:
            guards.freeze()
        tensors = [g.name for g in output.output_graph.guards if g.create_fn_name() == _TENSOR]
        guards._constants = guards._find_constants(tensors, args, kwargs)
        return guards

    @property
    def has_only_dynamo_guards(self) -> bool:
        """Whether nothing is asked but Dynamo's own guards."""
        return not (self._constants or self.setters)

    def freeze(self) -> None:
        """Take up what was assumed about sizes so far. Where sizes are open, tracing and passes
        assume more after Dynamo's capture, so this comes behind them; what would be assumed later
        is refused.
        """
        if self._unfrozen is None:
            return
        output, self._unfrozen = self._unfrozen.graph_capture_output, None
        guards = output.output_graph.guards
        # Asked in Python, a microsecond a block; hooks see what F saves, and are in no graph.
        guards.inner -= {g for g in guards if g.create_fn_name() == _SAVED_TENSORS_HOOKS}
        # Those of globals alone, each of which may compare two objects.
        names = {g: f"{g.name} {g.create_fn}" for g in guards}
        shared: Any = {
            g for g, n in names.items() if n[0] == "G" and "L[" not in n and "Local" not in n
        }
        with (
            get_metrics_context(),
            dynamo_timed("build_guards"),
            torch._dynamo.config.patch(DYNAMO),
        ):
            all_guards = guards.inner  # which is read again, for constants
            for name, part in ("check", all_guards - shared), ("check_globals", shared):
                guards.inner = part
                manager = output.build_guards(self.scope.function.__code__).guard_manager
                setattr(self, name, manager.root.check)
            guards.inner = all_guards
        sizes = output.output_graph.shape_env
        if self._open and sizes is not None:
            vars(sizes)["_error_on_new_guards"] = True

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the graph may run for these inputs, with the module as it is now."""
        if torch._C._len_torch_dispatch_stack() or (any(_HOOKS) and _tracked()):
            with unobserved():
                return self.hold(args, kwargs)
        function, args = traced_call(self.module, args)
        if function is not self.scope.function:
            return False
        bound = self.scope.bound(args, kwargs)
        if bound is None or not self.check(bound):
            return False
        for check in self._checks:
            if not check({}):
                return False
        if self._constants or self.setters:
            scope = self.scope.of(args, kwargs)
            if not all(eval(code, scope) is tensor for code, tensor in self._constants):
                return False
            if not all(setter.holds() for setter in self.setters):
                return False
        for block in self.blocks:  # noqa: SIM110 (in line, as every call comes here)
            if not block.hold():
                return False
        return True

    def name_of(self, constant: Tensor) -> str | None:
        """Path of a constant of the graph from the forward; None for one that tracing made."""
        for code, tensor in self._constants:
            if tensor is constant:
                path = code.co_filename.removeprefix("L['self'].")
                return re.sub(r"_modules\['([^']*)'\]", r"\1", path)
        return None

    def _find_constants(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[CodeType, Any]]:
        scope = self.scope.of(traced_call(self.module, args)[1], kwargs)
        input_ids = {id(leaf) for leaf in tree_flatten((args, kwargs))[0]}
        _, root = get_traced_fn(self.module)
        if root is self.module:
            # State that the forward reads through a closure instead would be a constant.
            input_ids |= {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        constants = []
        for name in names:
            code = compile(name, name, "eval")
            value = eval(code, scope)
            if id(value) in input_ids:
                continue
            if getattr(value, "requires_grad", False):
                raise CaptureError(
                    f"{forward_of(self.module)} reads {name}, a tensor that requires a gradient "
                    "but is neither an input nor a parameter; register it as nn.Parameter, or pass "
                    "it in"
                )
            constants.append((code, value))
        return constants


class DynamosGuards(Guards):
    """Of a graph that ``torch.compile`` calls, which asks its own guards."""

    def __init__(self) -> None:
        self._constants = []
