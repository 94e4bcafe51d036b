"""Dynamo's full-graph export of a module, with the guards under which the graph is valid."""

from __future__ import annotations

import builtins
import contextlib
import logging
import warnings
from collections import ChainMap
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import CaptureOutput, fullgraph_capture, get_traced_fn
from torch._dynamo.functional_export import create_fx_graph_from_captured_output
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._export.utils import _compiling_state_context

from autosplit.capture.attribute_values import attribute_values, label_values, returned_values
from autosplit.capture.backward_reads import BackwardReads, refuse_written
from autosplit.capture.diagnosis import forward_of
from autosplit.capture.guards import DYNAMO, ForwardScope, Guards, traced_call
from autosplit.capture.parameter_attributes import register_attributes
from autosplit.capture.side_effects import record_writes, refuse_drawn, setters
from autosplit.capture.workarounds.cache_layers import read_layer_configs_once
from autosplit.capture.workarounds.custom_functions import (
    refuse_absent_gradients,
    return_tensors_once,
    track_global_tensors,
)
from autosplit.capture.workarounds.dynamo import (
    decide_masks_statically,
    detach_graph_attributes,
    inline_compile_regions,
    keep_function_modes,
    limit_unrolling,
    refuse_lost_hooks,
    report_compiling,
    skip_function_names,
    skip_guard_timing,
    skip_local_maps,
    trace_quantizers,
)
from autosplit.capture.workarounds.module_slices import slice_module_lists
from autosplit.capture.workarounds.operators import allow_grouped_products
from autosplit.errors import CaptureError
from autosplit.torch_internals import TORCH
from autosplit.torch_internals.pytree import hold

if TYPE_CHECKING:
    from autosplit.capture.region_session import RegionSession


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    regions: RegionSession[Any] | None = None,
    *,
    values: bool | Collection[str] = False,
) -> tuple[fx.GraphModule, Guards]:
    """Export a module by Dynamo as one full graph, with guards.

    During the trace, ``torch.compiler.is_exporting()`` is True. If the forward then unrolls a long
    loop, the forward is traced again with False, because it may have a form without the loop.

    Args:
        module: the module to export.
        args: example positional inputs.
        kwargs: example keyword inputs.
        regions: session whose blocks Dynamo does not trace into.
        values: whether the graph returns the tensors that the forward sets as attributes of its
            modules, see ``values_of``; or the names of the attributes that it returns.

    Raises:
        PythonStateError: the forward changes Python state, other than by setting tensors that
            ``values`` allows.
        CaptureError: the forward reads values or draws numbers that a graph cannot contain.
    """
    # The forward may have a form without the long loop.
    with limit_unrolling() as limit, _compiling_state_context():
        for numbers in (True, False):
            reads = BackwardReads(numbers=numbers)
            try:
                return _export(module, args, kwargs, regions, reads, values)
            except Exception:
                if limit.line is not None:
                    break
                if not reads.read_numbers:
                    raise
    with report_compiling():
        return _export(module, args, kwargs, regions, reads, values)


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    regions: RegionSession[Any] | None,
    reads: BackwardReads,
    values: bool | Collection[str],
) -> tuple[fx.GraphModule, Guards]:
    opaque = contextlib.nullcontext if regions is None else regions.opaque
    returning: AbstractContextManager[list[tuple[str, str]]] = contextlib.nullcontext([])
    if values:
        returning = returned_values()
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(DYNAMO):
        warnings.simplefilter("always")  # issued after the trace: as errors they would end it
        # The steps of torch's dynamo_graph_capture_for_export, which itself drops the guards.
        with (
            get_metrics_context(),
            dynamo_timed("fullgraph_capture"),
            skip_function_names(),
            skip_guard_timing(),
            skip_local_maps(),
            # Inside, because the metrics that torch 2.11 records of a capture cannot hold
            # functions.
            torch._dynamo.config.patch(ignore_logging_functions=_messages()),
        ):
            with (
                keep_function_modes(),
                refuse_lost_hooks(),
                decide_masks_statically(),
                read_layer_configs_once(),
                slice_module_lists(),
                trace_quantizers(),
                allow_grouped_products(),
                record_writes() as written,
                opaque(),
                reads.traced(),
                returning as returned,
            ):
                captured = fullgraph_capture(module, args, kwargs)
            output = captured.graph_capture_output
            function, positional = traced_call(module, args)
            scope = ForwardScope(function).of(positional, kwargs) | {"G": output.f_globals}
            guards = Guards.of(module, args, kwargs, captured)
            names = None if isinstance(values, bool) else values
            labels = attribute_values(module, guards, scope, returned, names)
            guards.setters = setters(module, captured, written, scope, labels)
        _return_something(module, captured)
        with detach_graph_attributes(module, captured.backend_input):
            examples = hold(args), hold(kwargs)
            exported = create_fx_graph_from_captured_output(captured, module, *examples)
        label_values(exported, labels.values())
        inline_compile_regions(exported)
        return_tensors_once(exported)
        track_global_tensors(exported)
        refuse_absent_gradients(exported, output.traced_code)
        refuse_written(exported)
    _read_from_user_module(module, exported)
    register_attributes(module, exported)
    if TORCH < (2, 12):
        _find_builtins(exported)
    refuse_drawn(module, exported)
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    # Dynamo put the graph into the globals of the forward's module. There it would keep the model
    # and its example inputs alive for ever.
    if captured.backend_input is not None:
        output.f_globals.pop(captured.backend_input.backend_id, None)
    return exported, guards


def _return_something(module: nn.Module, captured: CaptureOutput) -> None:
    """Add a result to a graph without results, for which torch generates invalid code. A module
    that returns only views of its parameters has such a graph.

    Raises:
        CaptureError: the forward computes no tensor and returns only its inputs, so there is no
            graph.
    """
    if captured.backend_input is None:
        raise CaptureError(
            f"{forward_of(module)} computes no tensor and returns only its inputs; return a "
            "computed tensor (x.clone() instead of x)"
        )
    graph = captured.backend_input.graph_module.graph
    output, arguments = graph.output_node(), graph.find_nodes(op="placeholder")
    if not output.args[0] and arguments:
        output.args = ((arguments[0],),)


def _read_from_user_module(module: nn.Module, exported: Any) -> None:
    """Make the generated code read attributes from the user's module instead of the exported
    module. The exported module's class lacks tensors that are attributes of the user's class. It
    also lacks the defaults of the forward's arguments, which the code reads from the class if the
    module has hooks.
    """
    _, root = get_traced_fn(module)
    if isinstance(root, fx.GraphModule):  # its code reads neither
        return
    attributes = (value for kind in type(root).__mro__ for value in vars(kind).values())
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    if has_hooks or any(isinstance(value, Tensor) for value in attributes):
        exported.graph._codegen.dynamo_bytecode_flatten.input_processor.root = root


def _find_builtins(exported: Any) -> None:
    """Add builtins to the globals of the code that flattens inputs and results, because torch 2.11
    looks builtins up there.
    """
    codegen = exported.graph._codegen
    for half in (codegen.dynamo_bytecode_flatten, codegen.dynamo_bytecode_unflatten):
        half.f_globals = ChainMap(half.f_globals, vars(builtins))


def _messages() -> set[Any]:
    """Functions whose calls Dynamo drops from a trace: ``warnings.warn`` and every method of
    ``logging.Logger``, including methods that libraries add.
    """
    names = (name for name in vars(logging.Logger) if not name.startswith("_"))
    methods = {method for name in names if callable(method := getattr(logging.Logger, name))}
    return {warnings.warn, *methods}
