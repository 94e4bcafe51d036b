"""``trace_layers``: a joint graph traced for a few of the layers that repeat themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch._functorch._aot_autograd import descriptors as d

from autosplit.capture.cache.fingerprint import traced_value
from autosplit.passes.graph import placeholders
from autosplit.torch_internals.pytree import tree_flatten

from .extended import Extension
from .half import JointForms
from .layer_results import LayerResults
from .module_notes import ModuleNotes
from .node_forms import NodeForms, NotRepeatedError, UnlikeLayersError
from .series import Series
from .shortened import Shortened, shorten
from .trace_marks import marked, remarked

_MORE = 2  # layers that are kept where few were not enough

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class ShortResults:
    """Stands for the code that puts a module's results together.

    Attributes:
        copied: leaves to return as copies.
    """

    def __init__(self) -> None:
        self.copied: set[int] = set()

    def __call__(self, leaves: Any, inputs: Any) -> tuple[Any, ...]:
        return tuple(each.clone() if at in self.copied else each for at, each in enumerate(leaves))


def trace_layers(
    exported: fx.GraphModule,
    inputs: Inputs,
    leaves: Sequence[Any],
    trace: Callable[[ShortResults], fx.GraphModule],
) -> fx.GraphModule:
    """The joint graph of a module, for whose repeated layers a few were traced.

    Args:
        exported: Dynamo's graph of the module.
        inputs: positional and keyword ones that it was made for.
        leaves: of its results; tensors are the values of the graph's outputs.
        trace: traces ``exported`` as it is then; notes which results are to be copied.

    Raises:
        NotRepeatedError: its layers do not repeat themselves, or do not come out alike.
    """
    args, kwargs = inputs
    state = dict(exported.named_parameters(remove_duplicate=False))
    state |= dict(exported.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    codegen: Any = exported.graph._codegen
    given = codegen.dynamo_bytecode_flatten(*args, *kwargs.values())
    tracer = _Tracer(exported, [*map(id, given)], state, tree_flatten(inputs)[0], trace)
    joint = tracer.joint(exported.graph, _nodes(exported.graph, leaves))
    for node in joint.graph.nodes:
        node.meta = remarked(node.meta, None)
    return joint


def _nodes(graph: fx.Graph, leaves: Sequence[Any]) -> list[Any]:
    """Nodes that make the leaves of the results; others as they are."""
    made: dict[int, fx.Node] = {}
    for node in graph.output_node().all_input_nodes:
        if made.setdefault(id(traced_value(node)), node) is not node:
            raise NotRepeatedError(f"{node.name} is written into")
    found = [made.get(id(leaf), leaf) for leaf in leaves]
    if any(isinstance(each, Tensor) for each in found):
        raise NotRepeatedError("results are made of those of the graph")
    return found


class _Tracer:
    """Traces joint graphs of a module that is shortened.

    Args:
        exported: Dynamo's graph of the module.
        given: identities of the tensors that the graph's inputs stand for.
        state: parameters and buffers.
        leaves: of the inputs.
        trace: as for ``trace_layers``.
    """

    def __init__(
        self,
        exported: fx.GraphModule,
        given: list[int],
        state: dict[str, Any],
        leaves: list[Any],
        trace: Callable[[ShortResults], fx.GraphModule],
    ) -> None:
        self._exported, self._given, self._trace = exported, given, trace
        self._state, self._leaves = state, leaves

    def joint(self, graph: fx.Graph, results: Sequence[Any]) -> fx.GraphModule:
        """The joint graph of a forward, most layers of a run put in where a few were traced.

        Args:
            graph: the forward, with Dynamo's values.
            results: nodes and constants that it returns.
        """
        try:
            return self._extended(graph, shorten(graph, results))
        except UnlikeLayersError:  # at the ends of a run layers come out in other ways
            return self._extended(graph, shorten(graph, results, _MORE))

    def _extended(self, graph: fx.Graph, short: Shortened) -> fx.GraphModule:
        try:
            joint = self.joint(short.graph, short.graph.output_node().args[0])  # type: ignore[arg-type]
        except NotRepeatedError:
            joint = self._as_it_is(short.graph)
        body = [node for node in joint.graph.nodes if node.op not in {"placeholder", "output"}]
        layer_results = LayerResults(short)
        series = [*self._series(short, graph, joint.graph)]
        forms = JointForms(
            NodeForms(body, lambda node: node.meta.get("val")),
            [*series, *layer_results.add_tangents(joint.graph)],
            short,
        )
        moved = ModuleNotes(short).moved
        extension = Extension(forms, short.left_out, _first_backward(body), moved)
        extension.grow()
        _set_outputs(joint, layer_results, short, series, extension)
        return joint

    def _as_it_is(self, graph: fx.Graph) -> fx.GraphModule:
        with _in_place_of(self._exported, graph) as results, marked(graph):
            try:
                return self._trace(results)
            except Exception as error:  # traced whole, the module tells what it is
                raise NotRepeatedError(str(error)) from error

    def _series(self, short: Shortened, graph: fx.Graph, joint: fx.Graph) -> Iterator[Series]:
        """Parameters, buffers and inputs that the layers read."""
        taken: dict[int, list[fx.Node]] = {}
        for node in placeholders(joint):
            match node.meta["desc"]:
                case d.ParamAOTInput(target) | d.BufferAOTInput(target):
                    taken.setdefault(id(self._state[target]), []).append(node)
                case d.PlainAOTInput(at):
                    taken.setdefault(id(self._leaves[at]), []).append(node)
                case d.TangentAOTInput(d.PlainAOTOutput()):
                    pass
                case desc:
                    raise NotRepeatedError(f"the graph takes {desc!r}")
        given = dict(zip(placeholders(graph), self._given, strict=True))
        for chain in short.series:
            found = [taken.get(given[node], []) for node in chain]
            if any(len(each) != 1 for each in found):
                raise NotRepeatedError(f"{chain[0].name} has several names")
            left_out = [all(map(short.is_left_out, node.users)) for node in chain]
            series = Series([each for [each] in found], left_out.index(True), short.left_out)
            if any(node.users for node in series.untraced):
                raise NotRepeatedError(f"{chain[0].name} is read elsewhere")
            yield series


@contextlib.contextmanager
def _in_place_of(exported: fx.GraphModule, graph: fx.Graph) -> Iterator[ShortResults]:
    """While another graph stands in a module, whose results are not put together."""
    whole = exported._graph
    codegen: Any = graph._codegen
    put_together = codegen.dynamo_bytecode_unflatten
    codegen.dynamo_bytecode_unflatten = results = ShortResults()
    exported._graph, graph.owning_module = graph, exported
    try:
        yield results
    finally:
        exported._graph = whole
        codegen.dynamo_bytecode_unflatten = put_together


def _first_backward(body: Sequence[fx.Node]) -> int:
    """Index of the first node of the backward, behind which all are."""
    halves = [node.meta.get("partitioner_tag") == "is_backward" for node in body]
    return halves.index(True) if True in halves else len(body)


def _set_outputs(
    joint: fx.GraphModule,
    results: LayerResults,
    short: Shortened,
    series: Sequence[Series],
    extension: Extension,
) -> None:
    """Return what all layers return, and the gradients of what all layers read."""
    output = joint.graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    descs = list(output.meta["desc"])
    count = len(short.kept)
    if descs[:count] != [d.PlainAOTOutput(index) for index in range(count)]:
        raise NotRepeatedError("the graph returns more than the results")
    made = dict(zip(short.kept, values[:count], strict=True))
    returned = {at: extension.result(each, results.later(at)) for at, each in made.items()}
    for leaves, gap in results.series:
        ends = made[leaves[gap - 1]], made[leaves[gap + short.left_out]]
        returned |= zip(leaves[gap:], extension.between(*ends), strict=False)
    taken = [n for n in placeholders(joint.graph) if not n.meta["desc"].is_tangent()]
    at = {node: count + index for index, node in enumerate(taken)}
    gradients, grad_descs = values[count:], descs[count:]
    for each in series if gradients else ():
        early, late = each.inputs[each.gap - 1], each.inputs[each.gap + each.left_out]
        ends = values[at[early]], values[at[late]]
        for node, gradient in zip(each.untraced, extension.between(*ends), strict=True):
            gradients[at[node] - count] = gradient
            if gradient is not None:
                grad_descs[at[node] - count] = d.GradAOTOutput(node.meta["desc"])
        for index, node in enumerate(each.traced):
            later = short.left_out * (index >= each.gap)
            gradients[at[node] - count] = extension.result(values[at[node]], later)
    every = range(len(short.results))
    output.args = ([*(returned[index] for index in every), *gradients],)
    output.meta["desc"] = [*map(d.PlainAOTOutput, every), *grad_descs]
