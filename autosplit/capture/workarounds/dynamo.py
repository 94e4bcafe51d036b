"""Workarounds for forwards that a capture by Dynamo traces unlike ``torch.compile`` or Python."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch._dynamo import guards, symbolic_convert, trace_rules
from torch._dynamo.convert_frame import BackendInput, preserve_global_state
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import ConstantVariable, UserFunctionVariable
from torch._dynamo.variables.higher_order_ops import LocalMapWrappedHigherOrderVariable
from torch._dynamo.variables.torch import tracing_state_functions
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._guards import TracingContext
from torch.nn.modules.transformer import _detect_is_causal_mask

from autosplit.errors import CaptureError
from autosplit.torch_internals.patches import patched


def _by_captures() -> bool:
    """Whether torch's capture itself sets the stack of torch function modes aside. Setting the
    stack aside twice would lose it.
    """
    inner = preserve_global_state.__code__.co_consts
    codes = [constant for constant in inner if isinstance(constant, CodeType)]
    return any("torch_function_mode_stack_state_mgr" in code.co_names for code in codes)


@contextlib.contextmanager
def keep_function_modes() -> Iterator[None]:
    """Context for a capture, also inside of a compilation: it sets the torch function modes aside,
    and the capture records them.

    ``torch.set_default_device`` and ``with torch.device(...)`` push a mode on a stack.
    ``torch.compile`` sets this stack aside before it traces, and records it for the graph and its
    guards. ``fullgraph_capture`` does so only in torch 2.11. In later versions it records an empty
    stack, and building its guards fails ("Guard failed on the same frame it was created"). A
    capture inside of another one loses the stack that the outer capture has set aside. So this
    context restores the outer stack at its end.
    """
    put_aside = torch_function_mode_stack_state_mgr
    outer = put_aside.stack
    try:
        with contextlib.nullcontext() if _by_captures() else put_aside:
            yield
    finally:
        put_aside.stack = outer


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Context for a trace of Dynamo's graph, in which no torch function mode is active. Dynamo has
    traced through the modes of the call, and they must not act on its graph again.
    """
    put_aside = torch_function_mode_stack_state_mgr
    outer = put_aside.stack
    try:
        with put_aside:
            yield
    finally:
        put_aside.stack = outer


def function_modes_of_the_call() -> AbstractContextManager[None]:
    """Context, inside of a capture, in which the torch function modes of the captured call are
    active again, because guards check these modes.
    """
    return torch_function_mode_stack_state_mgr.temp_restore_stack()


@contextlib.contextmanager
def detach_graph_attributes(module: nn.Module, captured: BackendInput | None) -> Iterator[None]:
    """Context in which a ``GraphModule`` lacks the attributes that its captured graph also has.

    Modules may be graphs themselves: graph modules of ``torch.fx`` and ``torch.export``, and stages
    that ``torch.distributed.pipelining.pipeline`` cuts. torch copies the attributes of the captured
    module to the captured graph. The attributes of a ``GraphModule`` include its graph, which would
    replace the captured one.
    """
    attributes: dict[str, Any] = {}
    if captured is not None and isinstance(module, fx.GraphModule):
        graph_names = vars(captured.graph_module).keys() - nn.Module().__dict__.keys()
        attributes = {name: vars(module).pop(name) for name in graph_names & vars(module).keys()}
    try:
        yield
    finally:
        vars(module).update(attributes)


@contextlib.contextmanager
def refuse_lost_hooks() -> Iterator[None]:
    """Refuse hooks that a forward registers on tensors that it did not compute.

    Dynamo's graph contains the hooks on computed tensors. Hooks on inputs, parameters and buffers
    are registered by code around the graph, and an export silently drops this code.

    Raises:
        CaptureError: a hook would be lost; names the line that registers it.
    """
    lines: dict[int, str] = {}
    register: Any = SideEffects.register_hook
    remove: Any = SideEffects.remove_hook

    def register_hook(effects: Any, tensor: Any, hook: Any, handle: Any, name: str) -> None:
        register(effects, tensor, hook, handle, name)
        if tensor.source is not None:
            lines[handle.idx] = current_line()

    def remove_hook(effects: Any, number: int) -> None:
        remove(effects, number)
        lines.pop(number, None)

    with (
        patched(SideEffects, "register_hook", register_hook),
        patched(SideEffects, "remove_hook", remove_hook),
    ):
        yield
    for line in lines.values():
        raise CaptureError(
            f"{line} registers a hook on a tensor that the forward did not compute, which a graph "
            "cannot contain. Register it on a view (x = x.view_as(x) first), or outside of the "
            "forward"
        )


def refuse_written_deques(effects: SideEffects) -> None:
    """Refuse a forward that writes into a ``deque(maxlen=n)`` that exists already. Dynamo traces it
    without its maximum: after an addition, the forward would read one item too many.

    Args:
        effects: Dynamo's record of the traced forward.

    Raises:
        CaptureError: the forward writes into such a deque.
    """
    for value in effects.keepalive:
        if not isinstance(value, deque) or value.maxlen is None:
            continue
        if effects.is_modified(effects.id_to_variable[id(value)]):
            raise CaptureError(
                f"the forward writes into a deque of at most {value.maxlen} items, which torch "
                "traces as if it had no maximum; keep the items in a list and cut it "
                "(self.items = self.items[-n:])"
            )


def current_line() -> str:
    """``file:line: code`` of the user's line that is being traced."""
    for frame in reversed(TracingContext.extract_stack()):
        return f"{os.path.basename(frame.filename)}:{frame.lineno}: {(frame.line or '').strip()}"
    return "the forward"


LIMIT = 2048
"""Maximum number of operators from one line in one call: 512 steps of a state-space model."""


@contextlib.contextmanager
def decide_masks_statically() -> Iterator[None]:
    """Decide during tracing, without values of masks, which attention kernels run.

    - torch's Transformer layers read a mask's values to find out whether it is causal, which a
      graph cannot do. In this context, a mask is causal if the caller passes ``is_causal=True``.
    - transformers omits a mask that equals ``is_causal=True``, in eager mode and under
      ``torch.compile``. With a mask, other kernels run, for which grouped keys and values are
      repeated. For ``torch.export`` transformers makes all masks, because an exported graph must
      hold for any values. Captured graphs have guards, so its mask code sees
      ``is_torchdynamo_exporting()`` as False.
    - Without a cache, transformers looks for packed sequences in the values of positions, which a
      graph cannot do. In this context there are none if positions are the model's own
      ``torch.arange``.
    """
    original: Any = UserFunctionVariable.call_function

    def call_function(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call, with fixed results of functions that look at masks or positions."""
        called = getattr(function, "fn", None)
        name = getattr(called, "__name__", "")
        if called is _detect_is_causal_mask:
            function = UserFunctionVariable(cast(FunctionType, _is_said_to_be_causal))
        elif tx.f_globals.get("__name__") == "transformers.masking_utils":
            if name == "is_torchdynamo_exporting":
                return ConstantVariable.create(False)
            if name == "find_packed_sequence_indices" and _counts_up(args[0].as_proxy().node):
                return ConstantVariable.create(None)
        return original(function, tx, args, kwargs)

    with patched(UserFunctionVariable, "call_function", call_function):
        yield


def _counts_up(node: Any) -> bool:
    """Whether each row of a value is ``torch.arange`` with step 1, plus an integer."""
    while isinstance(node, fx.Node) and (
        node.target == "expand"
        or (node.target, *node.args[1:]) == ("unsqueeze", 0)
        or (node.target is operator.add and isinstance(node.args[1], int))
    ):
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target is torch.arange and len(node.args) < 3


def _is_said_to_be_causal(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    return is_causal is True


@contextlib.contextmanager
def trace_quantizers() -> Iterator[None]:
    """Context in which Dynamo traces torch's layers for quantization-aware training. Otherwise
    Dynamo leaves these layers to Python, although a graph can contain their operators.
    """
    inlined_directories: Any = trace_rules.get_mod_inlinelist
    root = os.path.dirname(torch.__file__)
    quantizer_directories = {f"{root}/ao/nn/", f"{root}/ao/quantization/"}
    with patched(
        trace_rules, "get_mod_inlinelist", lambda: inlined_directories() | quantizer_directories
    ):
        yield


class LongLoopError(TorchDynamoException):
    """A line recorded more than ``LIMIT`` operators in one traced call, by unrolling a loop."""


class UnrollingLimit:
    """Counter of operators for each line of each traced call.

    Attributes:
        line: ``file:line`` of a loop that was unrolled too far; None if there is none.
    """

    def __init__(self) -> None:
        self.line: str | None = None
        self._seen: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()

    def see(self, graph: OutputGraph) -> None:
        """Count an operator of the line that is being traced.

        Raises:
            LongLoopError: the line has recorded more than ``LIMIT`` operators.
        """
        frame: Any = graph.current_tx
        seen = self._seen.setdefault(frame, Counter())
        seen[frame.lineno] += 1
        if seen[frame.lineno] > LIMIT:
            self.line = f"{frame.f_code.co_filename}:{frame.lineno}"
            raise LongLoopError(f"{self.line} has more than {LIMIT} operators in the graph")


@contextlib.contextmanager
def limit_unrolling() -> Iterator[UnrollingLimit]:
    """Context in which Dynamo stops tracing if it unrolls a loop too far.

    Some models scan over a sequence by a loop if ``torch.compiler.is_exporting()``, and else by a
    closed form: ``associative_scan`` in transformers' Mamba. For a short sequence the unrolled loop
    runs faster than the closed form, and equals eager mode bit for bit. For a long sequence the
    loop takes minutes to trace. The caller then traces the closed form, under
    ``report_compiling``.
    """
    limit = UnrollingLimit()
    original: Any = OutputGraph.create_proxy

    def create_proxy(graph: OutputGraph, *args: Any, **kwargs: Any) -> Any:
        limit.see(graph)
        return original(graph, *args, **kwargs)

    with patched(OutputGraph, "create_proxy", create_proxy):
        yield limit


def skip_guard_timing() -> AbstractContextManager[Any]:
    """Context without torch's timing of guards. For a log, torch times the guards of each capture
    after it has flushed the processor's caches, for which it allocates 27 MiB.
    """
    return patched(guards, "profile_guard_manager", lambda *args: 0.0, create=True)


def skip_function_names() -> AbstractContextManager[Any]:
    """Context in which Dynamo does not look up the names of traced functions for its log of calls,
    unless the log is on. It would tokenize every file that it traces.
    """
    if symbolic_convert.trace_call_log.isEnabledFor(logging.DEBUG):
        return contextlib.nullcontext()
    return patched(symbolic_convert, "get_funcname", lambda *args: None)


def skip_local_maps() -> AbstractContextManager[Any]:
    """Context in which Dynamo does not look for DTensor's local maps, which it finds only while
    torch enables that. At the first look it would import ``torch.distributed.tensor.experimental``.
    """
    if LocalMapWrappedHigherOrderVariable._enabled:
        return contextlib.nullcontext()
    return patched(LocalMapWrappedHigherOrderVariable, "should_wrap_in_hop", lambda _: False)


def report_compiling() -> AbstractContextManager[Any]:
    """Context in which ``torch.compiler.is_exporting()`` is False in a traced forward, as it is
    under ``torch.compile``. In torch 2.11 the context changes nothing: Dynamo evaluates the
    function to False in all captures.
    """
    return patched(tracing_state_functions(), torch.compiler.is_exporting, False)


def inline_compile_regions(module: fx.GraphModule) -> None:
    """Inline calls of ``torch.compiler.nested_compile_region``. A call that is not inlined is one
    operator in the backward, and its weight gradients cannot be deferred.
    """
    # Inner bodies come before their callers.
    for graphs in reversed([part for part in module.modules() if isinstance(part, fx.GraphModule)]):
        calls = graphs.graph.find_nodes(op="call_function", target=_REGION)
        for node in calls:
            _inline(graphs, node, graphs.get_submodule(node.args[0].target))
        if calls:
            graphs.recompile()


_REGION = torch.ops.higher_order.invoke_subgraph


def _inline(module: fx.GraphModule, node: fx.Node, body: Any) -> None:
    copies = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
    with module.graph.inserting_before(node):
        results: Any = module.graph.graph_copy(body.graph, copies)
    for inner in body.graph.find_nodes(op="get_attr"):
        name = f"{node.name}_{inner.target}".replace(".", "_")
        copies[inner].target = name
        setattr(module, name, operator.attrgetter(inner.target)(body))
    for item in list(node.users):
        item.replace_all_uses_with(results[item.args[1]])
        module.graph.erase_node(item)
    module.graph.erase_node(node)


def forget_traced_values(module: fx.GraphModule) -> None:
    """Remove the fake values that Dynamo recorded in the bodies of higher-order operators:
    checkpointed regions, and forward and backward of custom autograd functions.

    Dynamo keeps these bodies when it captures a part of the graph again. It would then look up
    symbols of the earlier capture, such as sizes that depend on data, which the new capture lacks.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        body = operator.attrgetter(str(node.target))(module)
        if isinstance(body, fx.GraphModule):
            for operation in body.graph.nodes:
                for key in ("example_value", "unbacked_bindings"):
                    operation.meta.pop(key, None)
            forget_traced_values(body)
