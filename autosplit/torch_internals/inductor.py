"""Compilation of one graph by Inductor."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.passes.analysis.operators import is_random

_TAG = "partitioner_tag"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A graph that Inductor compiled.

    Attributes:
        call: takes a list, empties it, and returns the outputs.
        strides: what each output really has; None for what is no tensor, or is not known.
        source: what Inductor generated.
    """

    call: Callable[[list[Any]], Sequence[Any]]
    strides: list[tuple[int | torch.SymInt, ...] | None]
    source: str


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operators that Inductor wants traced through. It refuses to compile some of them."""
    return dict(select_decomp_table())


def rewrite_joint(joint: fx.GraphModule) -> None:
    """Inductor's rewrites of a joint graph before partitioning: attention and other patterns are
    fused, constants folded, random operators become functions of seeds.
    """
    mode = _fake_mode(joint.graph)
    joint.graph.set_codegen(fx.graph.CodeGen())  # AOTAutograd's expects what it traced
    roles = joint.graph.output_node().meta["roles"]
    drawn_in = _draws(joint.graph)
    with compile_lock, V.set_fake_mode(mode), tracing(TracingContext(mode)):
        joint_graph_passes(joint, _device(joint.graph))
    joint.graph.output_node().meta["roles"] = roles
    for node in joint.graph.nodes:
        if node.op == "call_function" and is_random(node):
            # Seeds are new operators; they belong where what they stand for was drawn.
            node.meta.setdefault(_TAG, drawn_in)
    joint.recompile()


def _draws(graph: fx.Graph) -> str:
    """Where random numbers are drawn, as AOTAutograd marks it: also in the backward, or not."""
    drawing = (n for n in graph.nodes if n.op == "call_function" and is_random(n))
    late = any(node.meta.get(_TAG) == "is_backward" for node in drawing)
    return "is_backward" if late else "is_forward"


def compile_module(
    module: fx.GraphModule,
    *,
    is_backward: bool,
    static: Collection[int],
    visible: Collection[int],
    donated: Collection[int] = (),
) -> Compiled:
    """Compile a graph; it is changed.

    Args:
        module: returns nodes only; its placeholders' ``meta["val"]`` are what it is called with.
        is_backward: as in ``torch.compile``.
        static: positions of inputs that keep their address, parameters above all.
        visible: positions of outputs that must have the strides that were traced.
        donated: positions of inputs of a backward whose memory it may write its own values into.
            What is compiled is found again by the text of the graph, so the names of its inputs
            must tell which these are.
    """
    mode = _fake_mode(module.graph)
    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    module.graph.output_node().meta["user_visible_output_idxs"] = sorted(visible)
    context = TracingContext(mode)
    # Where AOTAutograd says it, of all that it says there the one thing that Inductor reads.
    context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=sorted(donated))  # type: ignore[assignment]
    # Its CUDA graphs write every call's results where those of the last call were, and a next
    # microbatch comes before the last one's are used up.
    eager_launch = torch._inductor.config.patch({"triton.cudagraphs": False})
    with compile_lock, V.set_fake_mode(mode), tracing(context), eager_launch:
        compiled: Any = compile_fx_inner(
            module, examples, is_backward=is_backward, static_input_idxs=sorted(static)
        )
    strides = [_strides(expressions, mode) for expressions in compiled.output_strides]
    return Compiled(compiled, strides, compiled.source_code)


def fake_like(value: Tensor, graph: fx.Graph) -> Tensor:
    """A fake tensor for a real one, in the fake mode of a graph."""
    return _fake_mode(graph).from_tensor(value, static_shapes=True)


def _strides(
    expressions: Sequence[str] | None, mode: FakeTensorMode
) -> tuple[int | torch.SymInt, ...] | None:
    """Inductor keeps strides as text, so that they can be cached."""
    if expressions is None:
        return None
    if mode.shape_env is None:
        return tuple(int(expression) for expression in expressions)
    sizes = [mode.shape_env.deserialize_symexpr(expression) for expression in expressions]
    return tuple(size if isinstance(size, torch.SymInt) else int(size) for size in sizes)


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    values = (node.meta.get("val") for node in graph.nodes)
    return next(_mode_of(value) for value in values if isinstance(value, Tensor))


def _mode_of(value: Any) -> FakeTensorMode:
    mode: FakeTensorMode = value.fake_mode
    return mode


def _device(graph: fx.Graph) -> torch.device:
    values = (node.meta.get("val") for node in graph.nodes)
    return next(value.device for value in values if isinstance(value, Tensor))
