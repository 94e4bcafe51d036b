"""``trace_joint``: AOTAutograd's joint graph of what Dynamo exported."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from autosplit.capture.workarounds.eager_settings import as_eager
from autosplit.capture.workarounds.margin_losses import Decompositions, right_decompositions
from autosplit.torch_internals.dtensor import Sharding
from autosplit.torch_internals.pytree import TreeSpec, flatten_named, tree_flatten, tree_unflatten

from .dtensor_roles import shardings
from .pytree_objects import hold

_OWN_STORAGE = {OutputType.non_alias, OutputType.unsafe_view_alias}


@dataclasses.dataclass(frozen=True)
class TracedJoint:
    """A joint graph with AOTAutograd's descriptors.

    Attributes:
        graph: the graph; a forward only where nothing needs a gradient.
        names: path of every leaf of the result.
        spec: how the leaves make up the result.
        shardings: descriptor of what is a DTensor outside of the graph -> how it lies over ranks.
    """

    graph: fx.GraphModule
    names: tuple[str, ...]
    spec: TreeSpec
    shardings: Mapping[Any, Sharding]


def trace_joint(
    module: nn.Module,
    exported: fx.GraphModule,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    decompositions: Decompositions,
) -> TracedJoint:
    """Trace forward and backward together. Outputs that alias an input or each other become copies.

    Args:
        module: what was exported.
        exported: Dynamo's graph of it.
        inputs: positional and keyword ones that it was made for.
        decompositions: operators to trace through.
    """
    results = _Results(exported)
    joint = _trace(exported, *inputs, decompositions)
    infos = joint._aot_state.fw_metadata.output_info
    results.copied = {at for at, info in enumerate(infos) if info.output_type not in _OWN_STORAGE}
    if results.copied:
        joint = _trace(exported, *inputs, decompositions)
    lying = shardings(joint, module, tree_flatten(inputs)[0])
    return TracedJoint(joint.graph_module, results.names, joint.out_spec, lying)


def _trace(
    exported: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions,
) -> Any:
    decompositions = right_decompositions(decompositions)
    context = exported.meta.get("tracing_context")
    if context is None:
        context = TracingContext(exported.meta["fake_mode"])
    # The stack closes before anything real runs, or the fake mode would still be on. Passes change
    # the graph; to write its code as Python after each would take longer than they do.
    lazy = _use_lazy_graph_module(True)
    with (
        contextlib.ExitStack() as stack,
        tracing(context),
        as_eager(exported, decompositions),
        lazy,
    ):
        return aot_export_joint_with_descriptors(
            stack, exported, args, kwargs, decompositions=decompositions
        )


class _Results:
    """Replacement for the exported module's code that assembles its results, so that it is traced
    too: views of parameters that the module returns (``self.weight.mT``) are made there.

    Attributes:
        names: path of every leaf of the result, known once the module was traced.
        copied: leaves to return as copies.
    """

    def __init__(self, exported: Any) -> None:
        codegen = exported.graph._codegen  # AOTAutograd interprets the graph and asks this one
        self._original = codegen.dynamo_bytecode_unflatten  # which would run out of tracing's sight
        self.names: tuple[str, ...] = ()
        self.copied: set[int] = set()
        codegen.dynamo_bytecode_unflatten = self

    def __call__(self, leaves: Any, inputs: Any) -> Any:
        own = self._original
        args, kwargs = own.input_processor(inputs)
        put_together = own.out.forward_callable(
            compiled_fn=lambda *_: leaves, extra_globals=own.f_globals
        )
        tree = hold(put_together(*args, **kwargs))
        self.names = tuple(name for name, _ in flatten_named("output", tree))
        values, spec = tree_flatten(tree)
        for index in self.copied:
            values[index] = values[index].clone()
        return hold(tree_unflatten(values, spec))
