"""``BlockRegion``: the graphs of one kind of block. ``RegionCall``: one call of such a block.

While the surrounding model is traced, two nodes stand for each block:

    model's trace   block_forward(call, inputs)   block_backward(call, tangents)
    after expand    F                             I, then W

The nodes take and return only the tensors that cross between block and model. The block's
parameters, saved tensors and deferred tensors are left out: the block's own trace has them, and
tracing time grows with the number of tensors. ``expand`` adds them afterwards.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from autosplit.capture.gradient_terms import path_of_term, return_terms
from autosplit.capture.guards import BlockGuards
from autosplit.capture.input_sizes import Within
from autosplit.capture.region_session import CapturedBlock
from autosplit.errors import CaptureError
from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.graph import (
    ORIGIN,
    STATE,
    WEIGHT_OUTPUT,
    computed_outputs,
    inputs,
    outputs,
    placeholders,
    role_of,
)
from autosplit.passes.subgraph import Subgraph, call_subgraph
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten
from autosplit.torch_internals.traced_calls import computed, fake_empty, trace_call

if TYPE_CHECKING:
    from autosplit.capture.joint_graph import Capture


def block_forward(call: int, inputs: list[Tensor]) -> list[Tensor]:
    """The target of nodes that stand for a block's F; never called."""
    raise NotImplementedError


def block_backward(call: int, grads: list[Tensor]) -> list[Tensor]:
    """The target of nodes that stand for a block's I and W; never called."""
    raise NotImplementedError


# It computes gradients of parameters, too, which are no results until ``expand``.
fx.node.has_side_effect(block_backward)

ANCHOR = "autosplit_anchor"
"""A parameter of the surrounding graph that stands for the parameters of all blocks. With it,
autograd records each call, even if no input of the call requires a gradient."""


def new_anchor() -> Tensor:
    """A new tensor for the anchor. The anchor is an extra input of each block's call. It requires a
    gradient if any called block is trained, so that autograd runs the backward of the call. It gets
    none, because the sum over all calls would be traced.
    """
    return torch.empty(1)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockRegion(CapturedBlock):
    """The graphs of one kind of block for one kind of call; other graphs can call them.

    Attributes:
        name: name of the kind, unique in a model.
        capture: the capture of one block of this kind.
        graphs: F, I and W, from the capture's joint graph.
        within: a function from sizes of these graphs to sizes of the surrounding graph.
    """

    name: str
    capture: Capture
    graphs: SplitGraphs
    within: Within

    def empty(self, value: Tensor, make: Callable[..., Tensor] = fake_empty) -> Tensor:
        """An empty tensor with the layout of a value of the region, in sizes of the surrounding
        graph. By default it is a new fake tensor, whose making no trace records.
        """
        shape, strides = (map(self.within, sizes) for sizes in (value.shape, value.stride()))
        return make([*shape], [*strides], dtype=value.dtype, device=value.device)

    def empty_values(self, nodes: Iterable[fx.Node]) -> list[Tensor]:
        """New fake tensors with the layouts of the values of these nodes."""
        return [self.empty(node.meta["val"]) for node in nodes]

    @property
    def halves(self) -> dict[str, fx.GraphModule]:
        """The graphs F, I and W that exist, by name."""
        graphs = self.graphs.graphs()
        return {
            h: graphs[h] for h in ("forward", "backward_input", "backward_weight") if h in graphs
        }

    @cached_property
    def parts(self) -> dict[str, Subgraph]:
        """The graphs F, I and W that exist, as subgraphs, by name."""
        regions = self.graphs.regions
        times = {"forward": 0.0 if regions is None else regions.price.time}
        return {
            half: Subgraph.of(f"{self.name}_{half}", module, times.get(half, 0.0))
            for half, module in self.halves.items()
        }

    @cached_property
    def results(self) -> dict[str, Any]:
        """Map the path of each leaf of a call's result to the node that computes it, or to a
        constant.
        """
        return {role.name: v for role, v in outputs(self.graphs.joint.graph, Kind.OUTPUT)}

    @cached_property
    def result_nodes(self) -> dict[str, fx.Node]:
        """Map the path of each computed leaf of the result to its node, in order."""
        return {path: v for path, v in self.results.items() if isinstance(v, fx.Node)}

    def fake_result(self, leaves: list[Any]) -> Any:
        """A new result of a call, of fake tensors; ``leaves`` are the call's inputs."""
        nodes, tangents = self.result_nodes, {role.name for role in self.tangents}
        trained = [path in tangents for path in nodes]
        tensors = computed(lambda: self.empty_values(nodes.values()), trained)
        return self.result(dict(zip(nodes, tensors, strict=True)), leaves)

    def result(self, tensors: Mapping[str, Tensor], leaves: list[Any]) -> Any:
        """Assemble a call's result from its computed tensors, by path, and the call's inputs."""
        returned = {path: leaves[at] for path, at in self.capture.returned_inputs.items()}
        values = {**self.results, **returned, **tensors}
        return tree_unflatten(
            [values[path] for path in self.capture.outputs], self.capture.output_spec
        )

    @cached_property
    def tangents(self) -> dict[Role, fx.Node]:
        """Role and node of each output gradient that I takes, in order."""
        return inputs(self.graphs.joint.graph, Kind.TANGENT)

    @property
    def input_grads(self) -> dict[Role, fx.Node]:
        """Role and node of each input gradient that I returns, in order."""
        return dict(computed_outputs(self.graphs.joint.graph, Kind.INPUT_GRAD))

    @property
    def differentiated(self) -> list[str]:
        """Names of the gradients that I returns or may return: one for each input, in order, then
        further terms.
        """
        names = [role.name for role in (*self.input_roles, *self.input_grads)]
        return [*dict.fromkeys(names)]

    @cached_property
    def input_roles(self) -> list[Role]:
        """Roles of the tensors that the graphs take from the caller, in order."""
        return list(inputs(self.graphs.joint.graph, Kind.INPUT))

    @cached_property
    def state(self) -> dict[Role, fx.Node]:
        """Parameters and buffers that the graphs read."""
        return inputs(self.graphs.joint.graph, *STATE)

    @property
    def trained(self) -> bool:
        """Whether the block's W computes a gradient."""
        return bool(outputs(self.graphs.joint.graph, *WEIGHT_OUTPUT))

    def sum_as_autograd(self, leaves: list[Any]) -> bool:
        """Let I return gradients that are summed in autograd's order, see ``gradient_terms``; False
        if it cannot.

        Args:
            leaves: leaves of the call's inputs; nodes of Dynamo's graph stand for tensors.
        """
        capture, parts = self.capture, self.graphs.graphs()
        for path, leaf, count in zip(capture.inputs, leaves, capture.gradient_counts, strict=True):
            if count == 0 or not isinstance(leaf, fx.Node):
                continue
            graphs = [parts[name].graph for name in ("joint", "backward_input")]
            is_sum = count != 1 and len(leaf.users) > 1
            if leaves.count(leaf) > 1 or (is_sum and not return_terms(graphs, path, count)):
                return False
        return True


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RegionCall:
    """One call of a block in the forward of a model; the target of a node in Dynamo's graph.

    Attributes:
        number: position of the call among the calls of one trace.
        region: kind of the block.
        block: the block that is called.
        name: the block's name in the model.
        guards: conditions under which the region is valid for the block.
        refuse: a function that records why the block cannot be captured separately. The trace goes
            on, so that one trace finds all such blocks, and its result is dropped.
        detach: a function that records the path of a result that gets no gradient; the trace goes
            on, too.
    """

    number: int
    region: BlockRegion
    block: nn.Module
    name: str
    guards: BlockGuards
    refuse: Callable[[str], None]
    detach: Callable[[str], None]

    @property
    def __name__(self) -> str:
        return f"call_{self.region.name}"

    def __call__(self, anchor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace the call of the block, and return its result as fake tensors."""
        region = self.region
        leaves, _ = tree_flatten((args, kwargs))
        leaf_by_path = dict(zip(region.capture.inputs, leaves, strict=True))
        tensors = [leaf_by_path[path_of_term(name)] for name in region.differentiated]
        results = _RegionFunction.apply(self, anchor, *tensors)  # type: ignore[no-untyped-call]
        return region.result(dict(zip(region.result_nodes, results, strict=True)), leaves)

    def with_traced_strides(self, path: str, gradient: Tensor | None, traced: Tensor) -> Tensor:
        """The gradient of the result ``path``, with the strides for which the block was traced.

        Detaches a result without a gradient, because zeros in its place could become NaN in the
        block. Refuses a gradient of another layout, because kernels would round differently. Makes
        the gradient contiguous if the block was traced for a contiguous gradient of a result that
        is not contiguous: operators were decomposed after the layout of the gradient was fixed.
        """
        strides = tuple(map(self.region.within, traced.stride()))
        result = self.region.result_nodes[path].meta["val"]
        if gradient is None:
            self.detach(path)
        elif gradient.stride() == strides:
            return gradient
        elif gradient.is_contiguous() and traced.is_contiguous():
            return gradient.as_strided(gradient.shape, strides)
        elif traced.is_contiguous() and not result.is_contiguous():
            return gradient.contiguous()
        else:
            self.refuse(
                "the gradient of one of its results has another memory layout than the result"
            )
        # A new tensor, because values of the block's trace do not belong to this trace.
        return self.region.empty(traced, torch.empty_strided)


class _RegionFunction(torch.autograd.Function):
    """A block's F as the forward, and its I and W as the backward."""

    @staticmethod
    def forward(ctx: Any, call: RegionCall, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The node of a block's F: takes the block's inputs, and returns its results."""
        region = call.region
        values = region.empty_values(region.result_nodes.values())
        inputs = tensors[: len(region.input_roles)]
        results = trace_call(block_forward, call.number, inputs, values)
        ctx.call = call
        ctx.set_materialize_grads(False)
        trained = {role.name for role in region.tangents}
        pairs = zip(region.result_nodes, results, strict=True)
        ctx.mark_non_differentiable(*[result for path, result in pairs if path not in trained])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return (None for the call and the anchor, gradient of each input tensor, further terms of
        these gradients). Autograd adds the terms of a tensor in their order.
        """
        call: RegionCall = ctx.call
        region = call.region
        grad_by_path = dict(zip(region.result_nodes, grads, strict=True))
        tangents = [
            call.with_traced_strides(r.name, grad_by_path[r.name], node.meta["val"])
            for r, node in region.tangents.items()
        ]
        values = region.empty_values(region.input_grads.values())
        input_grads = trace_call(block_backward, call.number, tangents, values)
        grad_by_name = dict(
            zip([role.name for role in region.input_grads], input_grads, strict=True)
        )
        return None, None, *map(grad_by_name.get, region.differentiated)


_NO_WORD = re.compile(r"\W+")


def expand(joint: fx.GraphModule, calls: Sequence[RegionCall], names: Mapping[int, str]) -> None:
    """Replace the nodes that stand for blocks by calls of the blocks' F, I and W.

    Args:
        joint: a joint graph with roles; changed in place.
        calls: the calls, by number.
        names: maps the ``id`` of a parameter or buffer to its name in the model.

    Raises:
        CaptureError: a block shares a parameter with another block or with the rest of the model.
    """
    graph, expansion = joint.graph, _Expansion(joint.graph, names)
    for node in list(graph.nodes):
        if node.target is block_forward:
            expansion.forward(node, calls[node.args[0]])
        elif node.target is block_backward:
            expansion.backward(node, calls[node.args[0]])
    model_results = [pair for pair in outputs(graph) if pair[0].name != ANCHOR]
    results = {**expansion.updates, **dict(model_results), **expansion.gradients}
    graph.output_node().args = ([*results.values()],)
    graph.output_node().meta["roles"] = tuple(results)
    graph.eliminate_dead_code(lambda node: node.op in {"placeholder", "output"})
    joint.recompile()


class _Expansion:
    """The expansion of one joint graph.

    Attributes:
        updates: maps the role of a buffer to the node of its new value.
        gradients: maps the role of a parameter to the node of its gradient, and the role of state
            that a backward writes to the node of its new value.
    """

    def __init__(self, graph: fx.Graph, names: Mapping[int, str]) -> None:
        self._graph, self._names = graph, names
        holes = placeholders(graph)
        self._mode = next(n.meta["val"].fake_mode for n in holes if "val" in n.meta)
        self._input_roles = {*map(role_of, holes)}
        self._values: dict[tuple[int, Any], Tensor] = {}
        self._nodes: dict[RegionCall, dict[Role, fx.Node]] = {}
        self.updates: dict[Role, fx.Node] = {}
        self.gradients: dict[Role, fx.Node] = {}

    def forward(self, node: fx.Node, call: RegionCall) -> None:
        """Replace the node of a block's forward by a call of F."""
        region = call.region
        nodes = dict(zip(region.input_roles, node.args[1], strict=True))  # type: ignore[arg-type]
        for role in region.state:
            outer = self._model_role(call, role)
            if outer in self._input_roles:
                raise CaptureError(
                    f"{outer.name} is used by several blocks, or outside of its block"
                )
            self._input_roles.add(outer)
            nodes[role] = self._placeholder(outer, region, role)
        self._nodes[call] = nodes
        self._call(node, call, "forward")
        joint = region.graphs.joint.graph
        for role, _ in outputs(joint, Kind.UPDATE):
            self.updates[self._model_role(call, role)] = nodes[role]
        self._replace_results(
            node, [nodes[Role(Kind.OUTPUT, path)] for path in region.result_nodes]
        )

    def backward(self, node: fx.Node, call: RegionCall) -> None:
        """Replace the node of a block's backward by calls of I and W."""
        region, nodes = call.region, self._nodes[call]
        nodes |= zip(region.tangents, node.args[1], strict=True)  # type: ignore[arg-type]
        self._call(node, call, "backward_input")
        if region.trained:
            self._call(node, call, "backward_weight")
        results = outputs(region.graphs.joint.graph, *WEIGHT_OUTPUT, Kind.BACKWARD_UPDATE)
        for role, _ in results:
            self.gradients[self._model_role(call, role)] = nodes[role]
        self._replace_results(node, [nodes[role] for role in region.input_grads])

    def _model_role(self, call: RegionCall, role: Role) -> Role:
        """The role that a block's parameter or buffer has in the model."""
        return Role(role.kind, self._names[id(operator.attrgetter(role.name)(call.block))])

    def _placeholder(self, role: Role, region: BlockRegion, inner: Role) -> fx.Node:
        traced = region.state[inner]
        with self._graph.inserting_before(next(iter(self._graph.nodes))):
            node = self._graph.placeholder(traced.name)
        node.target = node.name
        node.meta = {"role": role, "val": self._shared(region, inner, traced.meta["val"], region)}
        return node

    def _call(self, node: fx.Node, call: RegionCall, half: str) -> None:
        """Insert a call of F, I or W before a node, and record the nodes of its results."""
        region, nodes = call.region, self._nodes[call]
        part = region.parts[half]
        with self._graph.inserting_before(node):
            arguments = [nodes[role] for role in part.arguments]
            values = [self._shared(part, at, value, region) for at, value in enumerate(part.values)]
            results = call_subgraph(self._graph, part, arguments, values)
        roles = {at: role for role, at in part.results.items() if isinstance(at, int)}
        noted = {key: node.meta[key] for key in (ORIGIN, "stack_trace") if key in node.meta}
        for at, result in enumerate(results):
            name = _NO_WORD.sub("_", f"{call.name}_{roles[at].name}")
            result.name = self._graph._graph_namespace.create_name(name, None)
            for new in (result, *result.all_input_nodes):
                new.meta |= noted
        for role, place in part.results.items():
            nodes[role] = results[place] if isinstance(place, int) else nodes[place]

    def _shared(self, of: object, at: Any, traced: Any, region: BlockRegion) -> Any:
        """A fake value of the model's trace that stands for ``traced``, a value of the region.

        A tensor's storage has the size that it has in the region. ``of`` and ``at`` identify a
        value; all calls of the region share its fake tensor, because nodes distinguish the calls.
        Numbers become sizes of the model's trace.
        """
        if not isinstance(traced, Tensor):
            return region.within(traced)
        key = id(of), at
        if key not in self._values:
            size = region.within(traced.untyped_storage().nbytes()) // traced.element_size()
            offset = region.within(traced.storage_offset())
            with self._mode:
                layout = region.empty(traced)
                memory = torch.empty(size, dtype=traced.dtype, device=traced.device)
                self._values[key] = memory.as_strided(layout.shape, layout.stride(), offset)
        return self._values[key]

    @staticmethod
    def _replace_results(node: fx.Node, values: Sequence[fx.Node]) -> None:
        """Replace the results of a node by ``values``, in order. Results without a value stay
        unread.
        """
        for user in list(node.users):
            at: Any = user.args[1] if user.target is operator.getitem else None
            if at is not None and at < len(values):
                user.replace_all_uses_with(values[at])
