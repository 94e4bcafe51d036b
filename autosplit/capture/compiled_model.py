"""A model under ``torch.compile`` with a backend of ours, and what that asks of Dynamo's graphs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, SkipFrame
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from autosplit.capture.workarounds.custom_functions import refuse_absent_gradients
from autosplit.capture.workarounds.operators import AS_IN_EAGER, refuse_traced_otherwise
from autosplit.errors import CaptureError, ShardedError, SplitError
from autosplit.passes.graph import placeholders
from autosplit.torch_internals.dynamo import source_name

from .side_effects import refuse_own_generators

_ROOT = re.compile(r"[LG]\['\w+'\]")
_MARK = "_is_torch_compile"  # an attribute meant for the wrapper that ``torch.compile`` returns


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
        with torch._dynamo.config.patch(AS_IN_EAGER):
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


def skip_what_is_traced_wrongly(module: fx.GraphModule) -> None:
    """Have Dynamo run the function as ordinary Python, where a graph is not insisted on."""
    context = TracingContext.try_get()
    try:
        refuse_absent_gradients(module, [] if context is None else context.traced_code)
        refuse_traced_otherwise(module)
    except CaptureError as error:
        if InstructionTranslator.current_tx().one_graph:
            raise
        raise SkipFrame(str(error)) from error


def unsplit(module: fx.GraphModule) -> fx.GraphModule:
    """A graph to be run as Dynamo found it, under ordinary autograd. Dynamo runs the function as
    ordinary Python instead where it calls ``torch.utils.checkpoint``: in a graph, that keeps no
    state of generators for when it computes again.
    """
    if any(node.target is tag_activation_checkpoint for node in module.graph.nodes):
        raise SkipFrame("its graph cannot be split, and checkpoints what it computes")
    return module


def input_sources(module: fx.GraphModule) -> list[str]:
    """Where Dynamo found each input of the graph, as Python: ``L['self'].weight``."""
    sources = [getattr(node, "_dynamo_source", None) for node in placeholders(module.graph)]
    return [*map(source_name, sources)]
