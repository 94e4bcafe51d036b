"""``Part``: one graph that Dynamo found, and whether it was split.

``History``: which weight gradients of one forward call W computes, and which autograd does.

Compiled graphs, and operators that ran outside any, are nodes of one graph behind the
outputs. A parameter that is reached there gets its gradient from an ordinary backward.

Products of a compiled graph that make weight gradients in I, undeferred.

A parameter whose gradient W computes enters a graph as itself. One that enters as a view, or as
something that another graph made of it, is an input like any other: I computes its gradient.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.analysis.operator_cost import flops, weight_flops
from autosplit.passes.graph import (
    FORWARD_OUTPUT,
    PRIMAL,
    ancestors,
    outputs,
    placeholders,
    role_of,
    source_line,
    tensor_of,
)
from autosplit.torch_internals.dynamo import (
    is_link,
    is_transposed_convolution,
    leaf_of,
    output_shape,
    python_function,
)

from .compiled_backward import call_of


class Part:
    """One graph of a model, compiled.

    Attributes:
        parameters: names of the parameters that need a gradient. Where modules share code,
            they share the graph; the names are those of the first.
        graphs: the split graphs; None where the graph has no backward or was not split.
        reason: why it was not split; empty where it was, or has no backward.
        lines: ``file.py:3-9`` for the user's lines that the graph holds.
        node: the class of autograd's nodes for calls of the graph; None until one is known.
    """

    def __init__(self, module: fx.GraphModule, parameters: Sequence[str]) -> None:
        self.parameters = tuple(parameters)
        self.graphs: SplitGraphs | None = None
        self.reason = ""
        self.lines = _lines(module.graph)
        self.node: type | None = None

    def give_up(self, reason: str) -> None:
        """Record why the graph cannot be split; its backward is an ordinary one."""
        self.reason = reason

    @property
    def is_split(self) -> bool:
        """Whether there is a W."""
        weight = None if self.graphs is None else self.graphs.backward_weight
        return weight is not None and bool(outputs(weight.graph))

    @property
    def state(self) -> str:
        """``split``, or why not."""
        if self.is_split or self.reason:
            return self.reason or "split"
        return "no backward" if self.graphs is None else "no parameters"

    @property
    def weight_flops(self) -> tuple[int, int]:
        """Floating-point operations of weight gradients in W, and in I all the same."""
        return (0, 0) if self.graphs is None else weight_flops(self.graphs)


def _lines(graph: fx.Graph) -> str:
    """The user's lines behind the graph, file by file."""
    found: dict[str, set[int]] = {}
    for node in graph.nodes:
        place = source_line(node).partition(" ")[0]
        path, _, number = place.rpartition(":")
        if path and number.isdigit():
            found.setdefault(os.path.basename(path), set()).add(int(number))
    return ", ".join(f"{name}:{_span(numbers)}" for name, numbers in found.items())


def _span(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


class WeightProducts:
    """Products of one graph by slot, the position among its tensor inputs in autograd's node."""

    def __init__(self, graphs: SplitGraphs) -> None:
        joint = graphs.joint.graph
        taken = [n for n in placeholders(joint) if role_of(n).kind in PRIMAL]
        self._slots = [role_of(node) for node in taken if tensor_of(node) is not None]
        self._results = [value for _, value in outputs(joint, *FORWARD_OUTPUT)]
        self._input_half = graphs.backward_input

    @classmethod
    def of(cls, part: Part) -> WeightProducts | None:
        """None for a graph without a backward."""
        return None if part.graphs is None else cls(part.graphs)

    def flops(self, slots: Sequence[int]) -> list[int]:
        """Floating-point operations of I for the gradient of each of these slots, of all that no
        gradient of another slot needs, nor W.
        """
        if self._input_half is None:
            return [0] * len(slots)
        wanted = [Role(Kind.INPUT_GRAD, self._slots[at].name) for at in slots]
        made: dict[Role, fx.Node] = {
            role: value
            for role, value in outputs(self._input_half.graph)
            if isinstance(value, fx.Node)
        }
        known = ancestors([value for role, value in made.items() if role not in wanted])
        found = []
        for role in wanted:
            own = ancestors([made[role]]) - known if role in made else set()
            found.append(sum(map(flops, own)))
            known |= own
        return found

    def sources(self, result: int) -> list[int]:
        """Slots that a result of the forward is computed from, buffers left out."""
        value = self._results[result] if result < len(self._results) else None
        if not isinstance(value, fx.Node):
            return []
        read = {role_of(node) for node in ancestors([value]) if node.op == "placeholder"}
        return [
            slot
            for slot, role in enumerate(self._slots)
            if role in read and role.kind is not Kind.BUFFER
        ]


# Autograd nodes through which a weight, or a part of it, reaches the product that uses it.
_SAME_VALUES = frozenset(
    {
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided"),
        *("Squeeze", "Unsqueeze", "Expand", "Clone", "ToCopy"),
        *("Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Diagonal"),
    }
)
_SUFFIX = re.compile(r"Backward\d*$")


@dataclasses.dataclass
class History:
    """Weight gradients of one forward call.

    Attributes:
        deferred: parameters whose gradient W computes.
        ordinary: parameters with a gradient from an ordinary backward, and the floating-point
            operations of those gradients (matrix products and convolutions; everything else
            counts 0): of operators outside compiled graphs, and of graphs that the parameter
            enters as a view or otherwise not as itself.
        unknown: Python functions outside compiled graphs. Their backward may reach any parameter,
            and nobody knows what it computes.
    """

    deferred: set[nn.Parameter] = dataclasses.field(default_factory=set)
    ordinary: dict[nn.Parameter, int] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)

    def share(self, late: int, early: int) -> float | None:
        """Share of the floating-point operations that W does, ``late`` of those and ``early``;
        where there are none, of the elements of the gradients; None where there is no gradient.
        """
        if not late + early:
            late = sum(parameter.numel() for parameter in self.deferred)
            early = sum(p.numel() for p in self.ordinary if p not in self.deferred)
        return late / (late + early) if late + early else None

    @classmethod
    def of(
        cls, outputs: Iterable[Tensor], inputs: Iterable[Tensor], parts: Iterable[Part] = ()
    ) -> History:
        """Walk back from the outputs to the inputs through the graphs of ``parts``."""
        history = cls()
        stop = {each.grad_fn for each in inputs}
        known = {part.node: products for part in parts if (products := WeightProducts.of(part))}
        weights = _Weights(known)
        for node in _nodes([each.grad_fn for each in outputs], stop):
            if is_link(node):
                continue
            function = None if type(node) in known else python_function(node)
            if function is not None and function not in history.unknown:
                history.unknown.append(function)
            found: dict[int, nn.Parameter] = {}
            for index, (operand, result) in enumerate(node.next_functions):
                call = call_of(leaf_of(operand, result))
                if call is not None:
                    history.deferred.add(call[0].parameters[call[1]])
                parameter = weights.of(operand, result)
                if parameter is not None:
                    found[index] = parameter
            products = known.get(type(node))
            own = products.flops([*found]) if products else [_flops(node, at) for at in found]
            for parameter, count in zip(found.values(), own, strict=True):
                history.ordinary[parameter] = history.ordinary.get(parameter, 0) + count
        return history


def _nodes(roots: Iterable[Any], stop: set[Any]) -> Iterator[Any]:
    seen = {None, *stop}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(operand for operand, _ in node.next_functions)


class _Weights:
    """Parameters behind the operands of autograd's nodes.

    Each node is looked at once: graphs that follow each other make a way through them for every
    choice of an input at each. And without recursion, as there may be thousands.
    """

    def __init__(self, known: Mapping[Any, WeightProducts]) -> None:
        self._known = known
        self._found: dict[tuple[Any, int], nn.Parameter | None] = {}

    def of(self, node: Any, result: int) -> nn.Parameter | None:
        """The parameter that this result of a node is a view or part of; for a compiled graph, the
        one that it is computed from alone. None for a leaf in a parameter's place.
        """
        node, result = _viewed(node, result)
        if call_of(leaf_of(node, result)) is not None:
            return None
        if (node, result) in self._found:
            return self._found[node, result]
        todo = [((node, result), self._edges(node, result))]
        while todo:
            key, edges = todo[-1]
            unknown = [edge for edge in edges if edge not in self._found]
            sources = [self._found[edge] for edge in edges if edge in self._found]
            if unknown and None not in sources:
                todo.append((unknown[0], self._edges(*unknown[0])))
                continue
            todo.pop()
            leaf = _parameter(*key)
            if leaf is None and sources and None not in sources:
                leaf = sources[0]
            self._found[key] = leaf
        return self._found[node, result]

    def _edges(self, node: Any, result: int) -> list[tuple[Any, int]]:
        """What a compiled graph's result is computed from; nothing for other nodes."""
        if _parameter(node, result) is not None or type(node) not in self._known:
            return []
        sources = self._known[type(node)].sources(result)
        return [_viewed(*node.next_functions[slot]) for slot in sources]


def _viewed(node: Any, result: int) -> tuple[Any, int]:
    """What a node's result is a view or part of."""
    while node is not None and _operator(node) in _SAME_VALUES:
        node, result = node.next_functions[0]
    return node, result


def _parameter(node: Any, result: int) -> nn.Parameter | None:
    """The parameter that a result is, as itself or as a leaf that a graph has in its place."""
    call = call_of(leaf_of(node, result))
    if call is not None:
        return call[0].parameters[call[1]]
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, nn.Parameter) else None


def _operator(node: Any) -> str:
    return _SUFFIX.sub("", node.name())


def _flops(node: Any, index: int) -> int:
    """Floating-point operations of the gradient of one operand of a product."""
    name, shape = _operator(node), output_shape(node)
    weight = output_shape(*node.next_functions[index])
    if name == "Convolution" and index == 1:
        # Each element of the smaller tensor's side meets every weight of one channel.
        transposed = is_transposed_convolution(node)
        source = node.next_functions[0][0] if transposed else node
        channel = math.prod(weight[1:])
        return 0 if source is None else 2 * math.prod(output_shape(source)) * channel
    if name in {"Mm", "Addmm", "Bmm", "Baddbmm"} and index == len(node.next_functions) - 1:
        columns = shape[-1] * (shape[0] if len(weight) == 3 else 1)
        return 2 * math.prod(shape) * (math.prod(weight) // columns)
    return 0
