"""What Dynamo captures otherwise than it compiles it or Python runs it: mended, or refused."""

from __future__ import annotations

import contextlib
import operator
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any, cast
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch._dynamo import guards, trace_rules
from torch._dynamo.convert_frame import BackendInput, preserve_global_state
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import ConstantVariable, UserFunctionVariable
from torch._dynamo.variables.torch import tracing_state_functions
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._guards import TracingContext
from torch.nn.modules.transformer import _detect_is_causal_mask

from autosplit.errors import CaptureError


def _by_captures() -> bool:
    """Whether captures do it themselves; twice, modes would be lost."""
    inner = preserve_global_state.__code__.co_consts
    codes = [constant for constant in inner if isinstance(constant, CodeType)]
    return any("torch_function_mode_stack_state_mgr" in code.co_names for code in codes)


@contextlib.contextmanager
def keep_function_modes() -> Iterator[None]:
    """Put modes aside for a capture, which knows of them; also inside of a compilation.

    ``torch.set_default_device`` and ``with torch.device(...)`` put a mode on a stack that
    ``torch.compile`` puts aside before it traces, and writes down for the graph and its guards.
    ``fullgraph_capture`` does not, but in torch 2.11: what it writes down is that there is none,
    which the guards then find to be wrong where they are made ("Guard failed on the same frame it
    was created"). A capture inside of another forgets what that one put aside.
    """
    put_aside = torch_function_mode_stack_state_mgr
    outer = put_aside.stack
    try:
        with contextlib.nullcontext() if _by_captures() else put_aside:
            yield
    finally:
        put_aside.stack = outer


def function_modes_of_the_call() -> AbstractContextManager[None]:
    """Inside of a capture, the modes that its call is made under, which guards ask for."""
    return torch_function_mode_stack_state_mgr.temp_restore_stack()


@contextlib.contextmanager
def detach_graph_attributes(module: nn.Module, captured: BackendInput | None) -> Iterator[None]:
    """The module is without those attributes that make a graph of it, and that the captured graph
    has its own of.

    Modules may be graphs themselves: ``torch.fx``'s, those of ``torch.export``, and stages that
    ``torch.distributed.pipelining.pipeline`` cuts. Torch gives the graph that it captured the
    attributes of the module that it captured it from. Of a ``GraphModule`` these are a graph as
    well, which then stands in for the captured one.
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
    """Refuse hooks that a forward registers on tensors it did not compute.

    Dynamo has a hook on what it traced in the graph; one on an input, a parameter or a buffer it
    registers in code around the graph, which an export leaves out without a word.

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
        patch.object(SideEffects, "register_hook", register_hook),
        patch.object(SideEffects, "remove_hook", remove_hook),
    ):
        yield
    for line in lines.values():
        raise CaptureError(
            f"{line} registers a hook on a tensor that the forward did not compute, which no graph "
            "can hold. Register it on a view of its own, as in x = x.view_as(x), or outside of the "
            "forward"
        )


def current_line() -> str:
    """Where the user's code is being traced."""
    for frame in reversed(TracingContext.extract_stack()):
        return f"{os.path.basename(frame.filename)}:{frame.lineno}: {(frame.line or '').strip()}"
    return "the forward"


LIMIT = 2048
"""Operators from one line of one call: 512 steps of a state-space model."""


@contextlib.contextmanager
def decide_masks_statically() -> Iterator[None]:
    """Kernels of attention are chosen by what the caller says, not by values of masks.

    torch's Transformer layers ask of a mask's values whether it is the causal one, which no graph
    holds: it is where the caller says so. And transformers leaves out a mask that says no more than
    ``is_causal=True``, in eager mode and under ``torch.compile``: with one, other kernels run, for
    which grouped keys and values are repeated. For ``torch.export`` it makes them all, as its
    graphs are for whatever values; these are for what their guards allow, so it is told otherwise.
    Without a cache it looks for packed sequences in the values of positions, which no graph holds:
    it is told that there are none where positions are what it has counted itself.
    """
    original: Any = UserFunctionVariable.call_function

    def call_function(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
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

    with patch.object(UserFunctionVariable, "call_function", call_function):
        yield


def _counts_up(node: Any) -> bool:
    """Whether a value is rows of ``torch.arange`` by steps of 1, plus a whole number."""
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
    """Dynamo traces torch's own layers for quantization that is trained for, which it leaves to
    Python else; their fake quantizers are operators.
    """
    inlined_directories: Any = trace_rules.get_mod_inlinelist
    root = os.path.dirname(torch.__file__)
    quantizer_directories = {f"{root}/ao/nn/", f"{root}/ao/quantization/"}
    with patch.object(
        trace_rules, "get_mod_inlinelist", lambda: inlined_directories() | quantizer_directories
    ):
        yield


class LongLoopError(TorchDynamoException):
    """A line is in the graph too often."""


class UnrollingLimit:
    """Attributes:
    line: of a loop that was unrolled too far; None as long as there is none.
    """

    def __init__(self) -> None:
        self.line: str | None = None
        self._seen: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()

    def see(self, graph: OutputGraph) -> None:
        """Count an operator of the line that is being traced.

        Raises:
            LongLoopError: there were too many.
        """
        frame: Any = graph.current_tx
        seen = self._seen.setdefault(frame, Counter())
        seen[frame.lineno] += 1
        if seen[frame.lineno] > LIMIT:
            self.line = f"{frame.f_code.co_filename}:{frame.lineno}"
            raise LongLoopError(f"{self.line} is in the graph more than {LIMIT} times")


@contextlib.contextmanager
def limit_unrolling() -> Iterator[UnrollingLimit]:
    """Dynamo stops tracing in here where it unrolls a loop too far.

    Models that scan over a sequence may have a closed form for compilers beside the loop, and ask
    ``torch.compiler.is_exporting()`` which one to take: transformers' Mamba has
    ``associative_scan``. Unrolled, a loop over a short sequence runs faster than the closed form
    and computes what eager mode does, bit for bit; over a long one its graph takes minutes to
    trace.
    """
    limit = UnrollingLimit()
    original: Any = OutputGraph.create_proxy

    def create_proxy(graph: OutputGraph, *args: Any, **kwargs: Any) -> Any:
        limit.see(graph)
        return original(graph, *args, **kwargs)

    with patch.object(OutputGraph, "create_proxy", create_proxy):
        yield limit


def skip_guard_timing() -> AbstractContextManager[Any]:
    """Torch times the guards of each capture for a log, behind a flush of the processor's caches,
    for which it allocates 27 MiB.
    """
    return patch.object(guards, "profile_guard_manager", lambda *args: 0.0, create=True)


def report_compiling() -> AbstractContextManager[Any]:
    """Dynamo answers so if a forward asks; in torch 2.11 it has the other answer for all."""
    return patch.dict(tracing_state_functions(), {torch.compiler.is_exporting: False})


def inline_compile_regions(module: fx.GraphModule) -> None:
    """Put the operators of ``torch.compiler.nested_compile_region`` in place of its calls: each
    would be one operator in the backward, whose weight gradients could not wait.
    """
    # Bodies before what calls them.
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
