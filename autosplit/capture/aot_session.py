"""Compilation sessions of Dynamo and AOTAutograd around split graphs.

AOTAutograd partitions the joint graph of every graph that Dynamo finds by a function of the
backend's choice. Ours labels the joint graph with roles, lets ``autosplit.passes`` split it,
and hands back a forward and a backward in AOTAutograd's calling convention. The backward
computes the gradients of inputs, has None where a deferred parameter's gradient would be,
and returns what W needs behind them. Everything else (aliasing, mutation, random state,
autocast, guards, symbolic shapes) stays AOTAutograd's and Dynamo's work.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import (
    BackendCompilerFailed,
    InternalTorchDynamoError,
    RestartAnalysis,
    SkipFrame,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from autosplit.capture.workarounds.dynamo import (
    inline_compile_regions,
    refuse_absent_gradients,
    return_tensors_once,
)
from autosplit.capture.workarounds.operators import (
    AS_IN_EAGER,
    as_eager,
    refuse_traced_otherwise,
)
from autosplit.errors import CaptureError, ShardedError, SplitError
from autosplit.passes import Kind, PassError, Role
from autosplit.passes.graph import placeholders
from autosplit.passes.rewrites.emit import eliminate_dead_code

from .aot_convention import AotGraphs, assemble, copy_graph, label, without_deferred
from .side_effects import refuse_own_generators

_ROOT = re.compile(r"[LG]\['\w+'\]")
_AS_WHOLE = {
    # As in a whole-graph capture: recurrent layers are traced into, and a hook that is added later
    # is noticed.
    "allow_rnn": True,
    "skip_nnmodule_hook_guards": False,
    **AS_IN_EAGER,
}
_MARK = "_is_torch_compile"  # an attribute meant for the wrapper that ``torch.compile`` returns

Boxed = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Callbacks of a backend for one graph.

    Attributes:
        compile: split graphs -> (F, I), both boxed.
        prepare: called with the joint graph before it is split.
        give_up: called with the reason where a graph cannot be split; it then runs as Dynamo
            made it, under ordinary autograd.
        infer: a graph in which nothing is differentiated -> boxed.
        decompositions: operators to trace through; None for those of eager.
    """

    compile: Callable[[AotGraphs], tuple[Boxed, Boxed]]
    prepare: Callable[[fx.GraphModule], None]
    give_up: Callable[[str], None]
    infer: Callable[[fx.GraphModule], Boxed]
    decompositions: dict[Any, Callable[..., Any]] | None


def compile_dynamo_graph(
    module: fx.GraphModule, example_inputs: Sequence[Any], roles: list[Role], splitter: Splitter
) -> Callable[..., Any]:
    """Compile a graph that Dynamo found, split where it can be.

    Args:
        module: the graph.
        example_inputs: what Dynamo calls it with.
        roles: PARAMETER or INPUT and a name, one for each example input.
        splitter: what to do with the graphs.
    """
    _skip_what_is_traced_wrongly(module)
    session = _AotSession(roles, splitter)
    compiler = aot_autograd(
        fw_compiler=session.forward,
        bw_compiler=session.backward,
        inference_compiler=session.inference,
        partition_fn=session.partition,
        decompositions=splitter.decompositions,
    )
    inline_compile_regions(module)
    return_tensors_once(module)
    try:
        with as_eager(module, splitter.decompositions):
            compiled: Callable[..., Any] = compiler(module, example_inputs)
    except RestartAnalysis:  # Dynamo traces once more, with what was learned
        raise
    except (_GivenUpError, RuntimeError, AssertionError) as error:
        # AOTAutograd refuses some graphs that run well (operators that return their argument,
        # writes into one of two inputs that share their memory).
        splitter.give_up(str(error).strip().partition("\n")[0])
        return unsplit(module)
    return compiled


def unsplit(module: fx.GraphModule) -> fx.GraphModule:
    """A graph to be run as Dynamo found it, under ordinary autograd. Dynamo runs the function as
    ordinary Python instead where it calls ``torch.utils.checkpoint``: in a graph, that keeps no
    state of generators for when it computes again.
    """
    if any(node.target is tag_activation_checkpoint for node in module.graph.nodes):
        raise SkipFrame("its graph cannot be split, and checkpoints what it computes")
    return module


def compile_model(
    model: nn.Module, backend: Callable[[fx.GraphModule, Sequence[Any]], Any]
) -> Callable[..., Any]:
    """The model under ``torch.compile`` with a backend of its own.

    Raises:
        CaptureError: the model draws random numbers in a way that ``torch.compile`` gets wrong.
    """
    refuse_own_generators(model)
    # Compiled code is kept with the code object, which modules of one class share: where torch
    # can (from 2.13), the count of recompilations is kept apart for each.
    isolate = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    options = {"isolate_recompiles": True} if isolate else {}
    before = _MARK in vars(model)
    compiled = torch.compile(model, backend=backend, **options)  # type: ignore[call-overload]
    if not before:  # the model is called without it, too, and is to be known as it was
        vars(model).pop(_MARK, None)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(_AS_WHOLE):
            try:
                return compiled(*args, **kwargs)
            except BackendCompilerFailed as error:
                if isinstance(error.inner_exception, ShardedError):
                    raise error.inner_exception from None
                raise
            except InternalTorchDynamoError as error:
                if str(error).startswith("RecursionError"):
                    raise RecursionError(str(error)) from error
                raise

    return call


def traced_modules(module: fx.GraphModule) -> list[nn.Module]:
    """The modules that a graph's code refers to, while Dynamo compiles it: the one whose
    ``forward`` it is, or those that a function reads.
    """
    frame = InstructionTranslator.current_tx().output.root_tx
    scope = {"L": frame.f_locals, "G": frame.f_globals}
    names = {found[0] for source in input_sources(module) if (found := _ROOT.match(source))}
    values = [eval(name, scope) for name in names] + [*frame.f_locals.values()]
    return list({id(value): value for value in values if isinstance(value, nn.Module)}.values())


def frozen_parameters(example_inputs: Sequence[Any]) -> list[int]:
    """Positions of parameters that a graph has no gradient for."""
    return [
        index
        for index, value in enumerate(example_inputs)
        if isinstance(value, nn.Parameter) and not value.requires_grad
    ]


def refuse_thawed(args: Sequence[Any], frozen: Sequence[int]) -> None:
    """Raise where a graph is called with a parameter that needs a gradient by now.

    Dynamo compiles another graph for it, but for torch 2.11 under the settings it comes with.
    """
    if frozen and torch.is_grad_enabled() and any(args[index].requires_grad for index in frozen):
        raise SplitError(
            "a parameter that was frozen when torch.compile compiled this graph needs a gradient "
            "now, which torch 2.11 overlooks; set use_recursive_dict_tags_for_guards and "
            "skip_tensor_guards_with_matching_dict_tags of torch._dynamo.config to False before "
            "compiling, or use torch 2.12 or later"
        )


def _skip_what_is_traced_wrongly(module: fx.GraphModule) -> None:
    """Have Dynamo run the function as ordinary Python, where a graph is not insisted on."""
    context = TracingContext.try_get()
    try:
        refuse_absent_gradients(module, [] if context is None else context.traced_code)
        refuse_traced_otherwise(module)
    except CaptureError as error:
        if InstructionTranslator.current_tx().one_graph:
            raise
        raise SkipFrame(str(error)) from error


class _GivenUpError(Exception):
    """Leaves AOTAutograd without its own partition, which draws a backward's random numbers in the
    forward and may recompute from a buffer that was overwritten since.
    """


class _AotSession:
    """The compilation of one graph; AOTAutograd calls its methods in this order."""

    def __init__(self, roles: list[Role], splitter: Splitter) -> None:
        self._roles = roles
        self._splitter = splitter
        self._split: tuple[Boxed, Boxed] | None = None
        self._size = 0

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if any("desc" not in node.meta for node in placeholders(joint.graph)):
            # The body of a higher-order operator, whose call is one node of the graph proper.
            return self._ordinary(joint, joint_inputs, num_fwd_outputs, options)
        static = set(options.get("static_lifetime_input_indices") or ())
        labelled = fx.GraphModule(joint, copy_graph(joint.graph))
        try:
            parameters = label(labelled.graph, self._roles, num_fwd_outputs, static)
            self._splitter.prepare(labelled)
            aot = assemble(labelled, num_fwd_outputs, parameters)
            self._split = self._splitter.compile(aot)
        except PassError as error:
            raise _GivenUpError(str(error)) from error
        self._size = len(aot.forward.graph.nodes)
        return aot.forward, without_deferred(aot)

    def forward(self, module: fx.GraphModule, example_inputs: Any) -> Any:
        if self._split is None:
            return boxed_nop(module, example_inputs)
        if len(module.graph.nodes) != self._size:
            raise PassError(
                "AOTAutograd changed the forward after it was split (saved-tensor hooks that are "
                "graphs do that); use hooks that are plain functions"
            )
        return _boxed(self._split[0])

    def backward(self, module: fx.GraphModule, example_inputs: Any) -> Any:
        if self._split is None:
            return boxed_nop(module, example_inputs)
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            # Nothing saved is overwritten by our backward, so it may run again (retain_graph).
            context.fw_metadata.bw_donated_idxs = []
        return _boxed(self._split[1])

    def inference(self, module: fx.GraphModule, example_inputs: Any) -> Any:
        if self._splitter.decompositions is None:
            return boxed_nop(module, example_inputs)
        for node in placeholders(module.graph):
            node.meta["role"] = Role(Kind.INPUT, node.name)
        output = module.graph.output_node()
        results: Any = output.args[0]
        output.meta["roles"] = tuple(Role(Kind.OUTPUT, f"[{at}]") for at in range(len(results)))
        return _boxed(self._splitter.infer(module))

    @staticmethod
    def _ordinary(
        joint: fx.GraphModule, joint_inputs: Any, num_fwd_outputs: int, options: dict[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Every operator runs once: AOTAutograd's min-cut partition may recompute from a buffer
        that the forward has overwritten since (seen with torch 2.13).
        """
        forward, backward = default_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        # Random operators that nobody reads would draw again, and move the generator.
        eliminate_dead_code(backward.graph)
        backward.recompile()
        return forward, backward


def _boxed(function: Boxed) -> Boxed:
    def call(args: list[Any]) -> list[Any]:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def input_sources(module: fx.GraphModule) -> list[str]:
    """Where Dynamo found each input of the graph, as Python: ``L['self'].weight``."""
    sources = [getattr(node, "_dynamo_source", None) for node in placeholders(module.graph)]
    return [*map(source_name, sources)]


def source_name(source: Any) -> str:
    """What Dynamo calls where it found something; empty for None."""
    name = getattr(source, "name", "")
    return name() if callable(name) else str(name)
