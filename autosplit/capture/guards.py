"""Guards: check whether a captured graph still fits its module.

``Guards`` check a module, ``BlockGuards`` a block that its graph calls. ``unobserved`` turns off
dispatch modes and module trackers, because graphs do not depend on them. ``ForwardScope`` has the
variables of a forward, by the names that Dynamo's guards use.
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
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch.nn.modules import module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.module_tracker import ModuleTracker

from autosplit.capture.diagnosis import forward_of
from autosplit.capture.input_sizes import is_open
from autosplit.capture.parameter_attributes import named_attributes
from autosplit.capture.side_effects import Setter
from autosplit.capture.workarounds.operators import AS_IN_EAGER
from autosplit.errors import CaptureError
from autosplit.torch_internals.pytree import tree_flatten

# Only trackers are removed from these: other global hooks may do anything, and are captured.
_HOOKS: tuple[dict[int, Any], ...] = (
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
)
_ALL_HOOKS = (*_HOOKS, module._global_backward_pre_hooks, module._global_backward_hooks)
_TRACKERS = {ModuleTracker._fw_pre_hook, ModuleTracker._fw_post_hook}


def _tracked() -> bool:
    """Whether a hook of torch's ``ModuleTracker`` is registered for all modules."""
    return any(_is_tracker(hook) for hooks in _HOOKS for hook in hooks.values())


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Context without dispatch modes and module trackers."""
    with _untracked(), _disable_current_modes():
        yield


@contextlib.contextmanager
def _untracked() -> Iterator[None]:
    """Context without the global hooks of module trackers. They are restored afterwards, in their
    old order among other hooks.
    """
    originals = [dict(hooks) for hooks in _HOOKS]
    for hooks, original in zip(_HOOKS, originals, strict=True):
        for key in [key for key, hook in original.items() if _is_tracker(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        # The dictionaries stay the same objects: handles of hooks refer to them weakly.
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
    if (  # the usual case of get_traced_fn, in a third of its time, because every call runs it
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
    """Variables of a function that Dynamo traces: its parameters, closure variables and globals.

    Arguments are bound as by ``inspect.Signature.bind`` with defaults applied. Functions without
    ``*args``, ``**kwargs`` and positional-only parameters avoid the cost of ``bind``, ten
    microseconds a call.

    Attributes:
        function: the function that is traced.
    """

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self._signature = inspect.signature(function, follow_wrapped=False)
        parameters = self._signature.parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        self._is_plain = set(kinds.values()) <= _PLAIN
        # With as many positional arguments, there is nothing else to bind.
        is_positional = self._is_plain and _KEYWORD_ONLY not in kinds.values()
        self._count = len(kinds) if is_positional and not function.__closure__ else None
        self._names = parameters.keys()
        self._positional = [n for n, kind in kinds.items() if kind is not _KEYWORD_ONLY]
        self._defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Local variables of one call; None if the function does not accept these arguments."""
        if len(args) == self._count and not kwargs:
            return dict(zip(self._positional, args, strict=True))
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
        """Variables of one call, as the scopes ``L`` and ``G`` of Dynamo's expressions."""
        bound = self.bound(args, kwargs) or {}
        return {"L": bound, "G": self.function.__globals__, "___from_numpy": _same}


def _same(array: Any) -> Any:
    """Return a NumPy array unchanged. Guards call it where Dynamo's expressions convert the array
    to a tensor, because guards compare constants by identity and each conversion makes a new
    tensor. The values need no guard: the graph's tensor shares the array's memory.
    """
    return array


DYNAMO = {
    # Dynamo stores shapes by code object: a second nn.Sequential would get symbolic sizes.
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    # A function's backward may call autograd.grad.
    "trace_autograd_ops": True,
    # Side effects are examined after the trace; the graph does not repeat them.
    "replay_side_effects": False,
    # Evaluate this guard in C++, as torch 2.15 does.
    "use_lamba_guard_for_object_aliasing": False,
    "side_effect_replay_policy": "silent",
    **AS_IN_EAGER,
}
"""Settings of Dynamo for captures and for building guards."""
_TENSOR = "TENSOR_MATCH"
_SAVED_TENSORS_HOOKS = "AUTOGRAD_SAVED_TENSORS_HOOKS"


class BlockGuards:
    """Guards of one call of a block that a captured graph calls.

    Args:
        guards: guards of the block's graphs. They must consist of Dynamo's own guards alone.
        module: the block.
        args: positional inputs with the structure of the call's inputs.
        kwargs: keyword inputs with the structure of the call's inputs.
    """

    def __init__(
        self, guards: Guards, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.guards, self._module = guards, module
        self._function = guards.scope.function
        function, positional = traced_call(module, args)
        self._variables = ForwardScope(function).bound(positional, kwargs)

    def hold(self) -> bool:
        """Whether the graphs are valid for the block's present state."""
        if traced_call(self._module, ())[0] is not self._function or self._variables is None:
            return False
        return bool(self.guards.check(self._variables))


class Guards:
    """Conditions under which a captured graph is valid for its module's present state.

    Dynamo specialises a graph on everything that the forward reads: attributes, dictionaries,
    globals, hooks, submodules. Dynamo's own guards check these. Tensors that are neither inputs nor
    state of the module are constants in the graph: the forward must still read the same objects.
    Attributes that the forward sets must already have the values that it would set.

    Args:
        module: the captured module.
        captured: Dynamo's output for the captured call.
        varies: whether some sizes are symbols.

    Attributes:
        scope: variables of the module's forward.
        setters: attributes and dictionary entries that the forward sets to the value they already
            have.
        blocks: guards of the blocks that the graph calls.
        forwards: (class, its forward) of the module and its submodules. Dynamo has no guard for a
            ``forward`` that is replaced on a class.
        check: evaluates Dynamo's own guards on the variables of one call; exists once frozen.
        check_globals: evaluates guards of globals and of torch's settings (grad mode, autocast)
            alone, the same for every block of a kind; exists once frozen.
    """

    check: Callable[[dict[str, Any]], bool]
    check_globals: Callable[[dict[str, Any]], bool]

    def __init__(self, module: nn.Module, captured: CaptureOutput, varies: bool) -> None:
        self.module = module
        self.scope = ForwardScope(get_traced_fn(module)[0])
        # Keep this code alive: when it is collected, Dynamo removes globals that the guards read.
        self._kept = captured.graph_capture_output.bytecode
        self._unfrozen: CaptureOutput | None = captured
        self._open, self._read_numbers = varies, False
        self._constants: list[tuple[CodeType, Any]] = []
        self.setters: list[Setter] = []
        self.blocks: list[BlockGuards] = []
        kinds: set[Any] = {type(part) for part in module.modules()}
        # Class methods are new objects at each look.
        self.forwards = [(k, k.forward) for k in kinds if k.forward is k.forward]

    @cached_property
    def _checks(self) -> set[Callable[[dict[str, Any]], bool]]:
        """Guards of globals and settings: one check for this graph, and one for each kind of
        block.
        """
        return {guards.check_globals for guards in (self, *(block.guards for block in self.blocks))}

    @classmethod
    def of(
        cls,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        captured: CaptureOutput,
    ) -> Guards:
        """Guards of the captured call ``module(*args, **kwargs)``.

        Raises:
            CaptureError: a constant requires a gradient, which the graph would not compute.
        """
        output = captured.graph_capture_output
        guards = cls(module, captured, is_open(args, kwargs))
        if not guards._open:
            guards.freeze()
        tensors = [g.name for g in output.output_graph.guards if g.create_fn_name() == _TENSOR]
        guards._constants = guards._find_constants(tensors, args, kwargs)
        return guards

    @property
    def has_old_forwards(self) -> bool:
        """Whether no ``forward`` was replaced on a class."""
        return all(kind.forward is forward for kind, forward in self.forwards)

    @property
    def has_only_dynamo_guards(self) -> bool:
        """Whether there are no other conditions than Dynamo's own guards."""
        return not (self._constants or self.setters)

    @cached_property
    def read_numbers(self) -> bool:
        """Whether guards read sizes that are open, or values of tensors, on which the forward
        branches.
        """
        return any(guards._read_numbers for guards in (self, *(b.guards for b in self.blocks)))

    def freeze(self) -> None:
        """End the collection of shape guards: build ``check`` and ``check_globals`` from all guards
        so far.

        Call it after tracing and passes, which may add guards on symbolic sizes. Guards added later
        raise an error.
        """
        if self._unfrozen is None:
            return
        output, self._unfrozen = self._unfrozen.graph_capture_output, None
        guards = output.output_graph.guards
        # This guard runs in Python, a microsecond for each block. Hooks on saved tensors run when F
        # saves them, outside of graphs.
        guards.inner -= {g for g in guards if g.create_fn_name() == _SAVED_TENSORS_HOOKS}
        # Guards of globals alone, each of which may compare two objects, and of torch's settings.
        names = {g: f"{g.name} {g.create_fn}" for g in guards}
        shared: Any = {
            g for g, n in names.items() if n[0] == "G" and "L[" not in n and "Local" not in n
        }
        shared |= {g for g in guards if isinstance(g.originating_source, GlobalStateSource)}
        with (
            unobserved(),  # guards are checked without dispatch modes
            get_metrics_context(),
            dynamo_timed("build_guards"),
            torch._dynamo.config.patch(DYNAMO),
        ):
            all_guards = guards.inner  # read again for constants
            for name, part in ("check", all_guards - shared), ("check_globals", shared):
                guards.inner = part
                manager = output.build_guards(self.scope.function.__code__).guard_manager
                setattr(self, name, manager.root.check)
            guards.inner = all_guards
        numbers = output.output_graph.shape_env
        if numbers is not None:
            self._read_numbers = bool(numbers.guards)
            if self._open:
                vars(numbers)["_error_on_new_guards"] = True

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the graph is valid for these inputs and the module's present state."""
        if torch._C._len_torch_dispatch_stack() or (any(_HOOKS) and _tracked()):
            with unobserved():
                return self.hold(args, kwargs)
        function, args = traced_call(self.module, args)
        if function is not self.scope.function:
            return False
        for kind, forward in self.forwards:
            if kind.forward is not forward:
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
        for block in self.blocks:  # noqa: SIM110 (inlined, because every call runs it)
            if not block.hold():
                return False
        return True

    def reads_constant(self, value: object) -> bool:
        """Whether the forward reads this tensor, which is neither an input nor state."""
        return any(value is tensor for _, tensor in self._constants)

    def constant_path(self, constant: Tensor) -> str | None:
        """Path by which the forward reads a constant; None for a constant that tracing made."""
        for code, tensor in self._constants:
            if tensor is constant:
                path = code.co_filename.removeprefix("L['self'].")
                return re.sub(r"_modules\['([^']*)'\]", r"\1", path)
        return None

    def _find_constants(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[CodeType, Any]]:
        """(compiled expression, value) of each tensor that is neither an input nor state of the
        module.
        """
        scope = self.scope.of(traced_call(self.module, args)[1], kwargs)
        input_ids = {id(leaf) for leaf in tree_flatten((args, kwargs))[0]}
        _, root = get_traced_fn(self.module)
        if root is self.module:
            # State that the forward reads through a closure instead is a constant.
            input_ids |= {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
            input_ids |= {id(tensor) for _, tensor in named_attributes(self.module)}
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
                    "it as an input"
                )
            constants.append((code, value))
        return constants


class DynamosGuards(Guards):
    """Guards of a graph that ``torch.compile`` calls. They check nothing, because torch.compile
    checks its own guards before each call of the graph.
    """

    def __init__(self) -> None:
        self._constants = []
