"""Compile one graph by Inductor, and rewrite a joint graph by Inductor's passes."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import types
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._inductor import codecache
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import LoweringException
from torch._inductor.fx_passes import fuse_attention, joint_graph
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.virtualized import V
from torch._logging._internal import trace_log
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.passes.analysis.operators import is_random

from .autograd import without_autocast
from .instruction_set import testing_one_set
from .kernel_files import KernelFiles
from .patches import patched

_TAG = "partitioner_tag"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A graph that Inductor compiled.

    Attributes:
        call: a function that takes one list of arguments, empties the list, and returns a list of
            outputs.
        strides: actual strides of each output; None for an output that is not a tensor or whose
            strides are unknown.
        source: the generated source code.
    """

    call: Callable[[list[Any]], list[Any]]
    strides: list[tuple[int | torch.SymInt, ...] | None]
    source: str


class LoweringError(Exception):
    """Inductor cannot compile an operator.

    Attributes:
        operator: the name of the operator and its overload.
        reason: type and first line of Inductor's error.
    """

    def __init__(self, error: LoweringException) -> None:
        super().__init__(str(error))
        self.reason = str(error).partition("\n")[0]
        target = re.search(r"target: (\S+)", str(error))
        self.operator = target[1] if target else ""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table of decompositions, by operator. Inductor cannot compile some of these
    operators.
    """
    return dict(select_decomp_table())


def rewrite_joint(joint: fx.GraphModule, mode: str) -> None:
    """Rewrite a joint graph by Inductor's passes before partitioning, in a mode of torch.compile.

    The passes fuse attention and other patterns, fold constants, and replace random operators by
    functions of seeds.
    """
    example = _first_tensor(joint.graph)
    fakes = example.fake_mode
    joint.graph.set_codegen(fx.graph.CodeGen())  # AOTAutograd's expects the traced signature
    roles = joint.graph.output_node().meta["roles"]
    drawn_in = _draws(joint.graph)
    needed = nullcontext() if _may_have_attention(joint.graph) else _without_attention()
    context = tracing(TracingContext(fakes))
    with compile_lock, V.set_fake_mode(fakes), context, _settings(mode), needed:
        joint_graph_passes(joint, example.device)
    joint.graph.output_node().meta["roles"] = roles
    for node in joint.graph.nodes:
        if node.op == "call_function" and is_random(node):
            # Seeds are new operators; they belong to the graph of the operators that they replace.
            node.meta.setdefault(_TAG, drawn_in)
    joint.recompile()


def _may_have_attention(graph: fx.Graph) -> bool:
    """Whether a pattern of attention may match: each one has two batched products."""
    return len(graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)) > 1


def _without_attention() -> AbstractContextManager[Any]:
    """Context in which Inductor does not load its patterns of attention, over a hundred."""
    return patched(joint_graph, "lazy_init", _load_other_patterns)


_load_all_patterns: Any = joint_graph.lazy_init


@functools.cache
def _load_other_patterns(device: torch.device) -> None:
    with patched(fuse_attention, "_sfdp_init", lambda _: None):
        _load_all_patterns.__wrapped__(device)  # not cached: a later graph may need all patterns


def _draws(graph: fx.Graph) -> str:
    """Return AOTAutograd's tag for operators that draw seeds.

    The tag is ``is_backward`` if the backward draws random numbers, and ``is_forward`` if only the
    forward does.
    """
    drawing = (n for n in graph.nodes if n.op == "call_function" and is_random(n))
    late = any(node.meta.get(_TAG) == "is_backward" for node in drawing)
    return "is_backward" if late else "is_forward"


def compile_module(
    module: fx.GraphModule,
    *,
    mode: str,
    is_backward: bool,
    static: Collection[int],
    visible: Collection[int],
    donated: Collection[int],
    kernels: KernelFiles,
    asserts_inputs: bool,
) -> Compiled:
    """Compile a graph by Inductor, which changes the graph in place.

    Args:
        module: the graph. It returns nodes only, and its placeholders' ``meta["val"]`` are fake
            tensors for its inputs.
        mode: the mode of torch.compile.
        is_backward: whether Inductor compiles the graph as ``torch.compile`` compiles a backward.
        static: positions of inputs that keep their address, mostly parameters.
        visible: positions of outputs that must have the traced strides.
        donated: positions of inputs whose memory a backward may overwrite. A donated input must
            have a name that no other input has in any graph, because Inductor's cache compares
            graphs by text.
        kernels: compiles the graph's C++ kernels.
        asserts_inputs: whether the code asserts sizes and strides of its inputs, which takes half a
            microsecond for each. Graphs with and without assertions must have different names of
            inputs, because Inductor's cache compares graphs by text.

    Raises:
        LoweringError: Inductor cannot compile an operator of the graph.
    """
    fakes = _first_tensor(module.graph).fake_mode
    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    module.graph.output_node().meta["user_visible_output_idxs"] = sorted(visible)
    context = TracingContext(fakes)
    # Inductor reads only this attribute of AOTAutograd's metadata.
    context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=sorted(donated))  # type: ignore[assignment]
    with (
        without_autocast(),  # graphs have their casts already
        compile_lock,
        V.set_fake_mode(fakes),
        tracing(context),
        _settings(mode),
        testing_one_set(),
        kernels.collecting(),
        _without_key_details(),
        nullcontext() if asserts_inputs else _without_assertions(),
    ):
        try:
            compiled: Any = compile_fx_inner(
                module, examples, is_backward=is_backward, static_input_idxs=sorted(static)
            )
        except Exception as error:
            cause = getattr(error, "inner_exception", error)
            if isinstance(cause, LoweringException):
                raise LoweringError(cause) from error
            raise
    strides = [_strides(expressions, fakes) for expressions in compiled.output_strides]
    return Compiled(_direct_call(compiled), strides, compiled.source_code)


def _direct_call(compiled: CompiledFxGraph) -> Callable[[list[Any]], list[Any]]:
    """The generated function without Inductor's bookkeeping around it, which takes three
    microseconds a call. The bookkeeping is for profiles, and for kernels of other devices than the
    CPU, which are tuned at their first call.
    """
    generated: Any = compiled.current_callable if {*compiled.device_types} <= {"cpu"} else compiled

    def call(args: list[Any]) -> list[Any]:
        if torch.autograd.profiler._is_profiler_enabled:
            return list(compiled(args))
        return list(generated(args))

    return call


def _without_assertions() -> AbstractContextManager[Any]:
    """Context in which generated code asserts nothing of its inputs."""
    return patched(PythonWrapperCodegen, "codegen_input_size_asserts", lambda _: None)


def _without_key_details() -> AbstractContextManager[Any]:
    """Context in which Inductor does not describe the keys of its cache for logs that are off. For
    a description it pickles and hashes every part of a key once more.
    """
    if trace_log.handlers or codecache.log.isEnabledFor(logging.DEBUG):
        return nullcontext()
    return patched(codecache.FxGraphCachePickler, "debug_lines", lambda *_: [])


def _settings(mode: str) -> AbstractContextManager[Any]:
    """Context with Inductor's settings for a mode of torch.compile."""
    # Inductor's CUDA graphs write results over those of the last call, but the next microbatch runs
    # before the last one's results are consumed.
    settings = {**torch._inductor.list_mode_options(mode), "triton.cudagraphs": False}
    context: AbstractContextManager[Any] = torch._inductor.config.patch(settings)
    return context


def fake_like(value: Tensor, graph: fx.Graph) -> Tensor:
    """A fake tensor with the properties of a real one, in the fake mode of a graph."""
    fake: Tensor = _first_tensor(graph).fake_mode.from_tensor(value, static_shapes=True)
    return fake


def _strides(
    expressions: Sequence[str] | None, mode: FakeTensorMode
) -> tuple[int | torch.SymInt, ...] | None:
    """Parse Inductor's texts of an output's strides, which Inductor can cache; None for None."""
    if expressions is None:
        return None
    if mode.shape_env is None:
        return tuple(int(expression) for expression in expressions)
    sizes = [mode.shape_env.deserialize_symexpr(expression) for expression in expressions]
    return tuple(size if isinstance(size, torch.SymInt) else int(size) for size in sizes)


def _first_tensor(graph: fx.Graph) -> Any:
    """The first fake tensor of a graph."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next(value for value in values if isinstance(value, Tensor))
