"""``GradientDependence``: on which outputs each gradient depends, which gradients share storage,
and which gradients W can compute.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import fx

from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.analysis.aliasing import fills_storage, is_view, producer, storage_root
from autosplit.passes.graph import (
    ancestors,
    computed_outputs,
    concrete,
    inputs,
    outputs,
    own_gradients,
)
from autosplit.passes.subgraph import reached, subgraph_of
from autosplit.runtime.tensor_spec import TensorSpec

_GRADIENT_OF = {Kind.PARAMETER_GRAD: Kind.PARAMETER, Kind.INPUT_GRAD: Kind.INPUT}


def gradient_sources(joint: fx.Graph, *kinds: Kind) -> dict[str, frozenset[str]]:
    """Map the name of each gradient of these kinds to the names of the outputs on whose gradients
    it depends, and of ``own_gradients``.

    Some gradients depend on no output's gradient: the gradient of ``round``, or a gradient without
    elements. Such a gradient is mapped to the outputs that depend on its input or parameter.
    """
    starts = inputs(joint, Kind.TANGENT) | own_gradients(joint)
    names = [role.name for role in starts]
    depend = reached(joint, [*starts.values()])
    bits = {role: depend[value] for role, value in computed_outputs(joint, *kinds)}
    # All parameters of a layer depend on the same outputs.
    names_of = {
        mask: frozenset(name for at, name in enumerate(names) if mask >> at & 1)
        for mask in {*bits.values()}
    }
    tangents = [role.name for role in starts if role.kind is Kind.TANGENT]
    return {
        r.name: names_of[mask] or _computed_from(joint, r, tangents) for r, mask in bits.items()
    }


def _computed_from(joint: fx.Graph, gradient: Role, tangents: Collection[str]) -> frozenset[str]:
    """The differentiable outputs that depend on the input or parameter of a gradient; all
    differentiable outputs if none depends on it.
    """
    kind = _GRADIENT_OF[gradient.kind]
    source = inputs(joint, kind).get(Role(kind, gradient.name))
    users = reached(joint, [source] if source else [])
    results = computed_outputs(joint, Kind.OUTPUT, Kind.UPDATE)
    names = {role.name for role, value in results if users[value]}
    return frozenset(tangents) & names or frozenset(tangents)


def outputs_read_inside(joint: fx.Graph) -> frozenset[str]:
    """Names of differentiable outputs from which the graph computes other outputs."""
    trained = {role.name for role in inputs(joint, Kind.TANGENT)}
    pairs = computed_outputs(joint, Kind.OUTPUT, Kind.UPDATE)
    nodes = {role.name: v for role, v in pairs if role.name in trained}
    depend = reached(joint, [*nodes.values()])
    return frozenset(
        name
        for at, (name, value) in enumerate(nodes.items())
        if any(depend[other] >> at & 1 for other in nodes.values() if other is not value)
    )


def borrowed_gradients(graph: fx.Graph) -> frozenset[str]:
    """Parameters whose gradient must be copied before it is added to or kept as ``.grad``.

    Such a gradient shares storage with another result or an argument, overlaps itself, is only a
    part of its storage, or is conjugated when it is read: torch adds to no list of such tensors.
    """
    pairs = computed_outputs(graph)
    uses = Counter(storage_root(value) for _, value in pairs)
    return frozenset(
        role.name
        for role, value in pairs
        if role.kind is Kind.PARAMETER_GRAD
        and (uses[storage_root(value)] > 1 or not fills_storage(value))
    )


class Missing(NamedTuple):
    """Parameters and inputs that get no gradient, because no output that depends on them has one.

    Attributes:
        parameters: names of the parameters without a gradient.
        inputs: positions of the inputs without a gradient.
        outputs: names of the differentiable outputs without a gradient.
    """

    parameters: frozenset[str]
    inputs: Sequence[int]
    outputs: frozenset[str]


NONE_MISSING = Missing(frozenset(), (), frozenset())


class GradientDependence:
    """Static facts about the gradients of one module, computed from its graphs when first read.

    Args:
        graphs: the module's graphs.
        input_names: paths of the module's inputs.
        tangents: (name, position among all outputs) of each differentiable output.
    """

    def __init__(
        self, graphs: SplitGraphs, input_names: Sequence[str], tangents: Sequence[tuple[str, int]]
    ) -> None:
        self._graphs = graphs
        self._input_names = input_names
        self._tangents = tangents
        self._missing: dict[frozenset[str], Missing] = {}

    def missing(self, output_grads: Sequence[object]) -> Missing:
        """The parameters and inputs that get no gradient from a backward in which some outputs have
        no gradient.

        Args:
            output_grads: one entry for each output of the module; None for an output without a
                gradient.
        """
        absent = frozenset([name for name, at in self._tangents if output_grads[at] is None])
        if not absent:
            return NONE_MISSING
        if absent not in self._missing:
            sources = self._parameter_sources.items()
            idle = {name for name, outputs in self._input_sources.items() if outputs <= absent}
            self._missing[absent] = Missing(
                frozenset([name for name, outputs in sources if outputs <= absent]),
                tuple([at for at, name in enumerate(self._input_names) if name in idle]),
                absent,
            )
        return self._missing[absent]

    def inputs_given(self, output_grads: Sequence[object]) -> list[bool]:
        """For each input, whether it gets a gradient from a backward in which some outputs have no
        gradient.

        Args:
            output_grads: see ``missing``.
        """
        idle = self.missing(output_grads).inputs
        trained = self._input_sources.keys()
        return [name in trained and at not in idle for at, name in enumerate(self._input_names)]

    @cached_property
    def read_inside(self) -> list[tuple[str, int]]:
        """(path, position among all outputs) of each output that other outputs are computed
        from.
        """
        read = outputs_read_inside(self._graphs.joint.graph)
        return [(name, at) for name, at in self._tangents if name in read]

    @cached_property
    def borrowed(self) -> frozenset[str]:
        """Parameters whose gradient must be copied, see ``borrowed_gradients``."""
        if self._graphs.backward is None:
            return frozenset()
        return borrowed_gradients(self._graphs.backward.graph)

    @cached_property
    def inseparable(self) -> dict[str, str]:
        """Maps a parameter whose gradient cannot be deferred to the operator that computes the
        gradient.

        The gradient cannot be deferred because an input gradient needs the operator, too, as in a
        fused recurrent layer, a norm, or a sum of an input and a weight.
        """
        graph = self._graphs.joint.graph
        input_grads = computed_outputs(graph, Kind.INPUT_GRAD)
        input_grad_closure = ancestors(node for _, node in input_grads)
        producers = {
            role.name: _inseparable_producer(node, input_grad_closure)
            for role, node in computed_outputs(graph, Kind.PARAMETER_GRAD)
        }
        return {name: str(node.target) for name, node in producers.items() if node is not None}

    @cached_property
    def deferred_share(self) -> float:
        """Share of the weight gradients, in elements, that W can compute; 1 if there are no weight
        gradients.
        """
        sizes = {n: math.prod(spec.shape) for n, spec in self.gradient_specs.items()}
        waiting = sum(size for name, size in sizes.items() if name not in self.inseparable)
        total = sum(sizes.values())
        return waiting / total if total else 1.0

    @cached_property
    def dense(self) -> bool:
        """Whether the gradients of all parameters are strided tensors."""
        values = [value for _, value in outputs(self._graphs.joint.graph, Kind.PARAMETER_GRAD)]
        return all(value.meta["val"].layout is torch.strided for value in values)

    @cached_property
    def gradient_specs(self) -> dict[str, TensorSpec]:
        """Maps a parameter's name to the spec of its gradient, if the gradient is a strided
        tensor.
        """
        pairs = outputs(self._graphs.joint.graph, Kind.PARAMETER_GRAD)
        values = {role.name: value.meta["val"] for role, value in pairs}
        dense = {k: v for k, v in values.items() if v.layout is torch.strided}
        return {k: TensorSpec.of(v).at(concrete) for k, v in dense.items()}

    @cached_property
    def _parameter_sources(self) -> dict[str, frozenset[str]]:
        return gradient_sources(self._graphs.joint.graph, Kind.PARAMETER_GRAD)

    @cached_property
    def _input_sources(self) -> dict[str, frozenset[str]]:
        return gradient_sources(self._graphs.joint.graph, Kind.INPUT_GRAD)


def _inseparable_producer(
    value: fx.Node, input_grad_closure: Collection[fx.Node]
) -> fx.Node | None:
    """The operator that computes a value, if input gradients need it; otherwise None.

    If a call of a repeated block computes the value, the operator inside the block is returned.
    """
    while is_view(value):
        value = value.args[0]  # type: ignore[assignment]
    called = subgraph_of(value) if value.target is operator.getitem else None
    if called is None:
        node = producer(value)
        return node if node in input_grad_closure else None
    call, place = value.args
    results = [result for _, result in outputs(called.module.graph)]
    wanted = [results[item.args[1]] for item in call.users if item in input_grad_closure]  # type: ignore
    return _inseparable_producer(results[place], ancestors(wanted))  # type: ignore[index]
