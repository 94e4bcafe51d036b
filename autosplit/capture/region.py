"""``Region``: a kind of block as graphs, and ``RegionCall``: a call of one of these blocks.

While the model around is traced, three operators stand for F, I and W of a block. What F saves and
what I defers are one token each, and so are the block's parameters and their gradients: a trace
takes its time by the tensor, and the block's own trace knows all of them. ``expand`` puts it in
afterwards: calls of blocks in a joint graph, from tokens to all tensors that they stand for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from autosplit.errors import CaptureError
from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.graph import ORIGIN, STATE, inputs, outputs, placeholders, role_of
from autosplit.passes.subgraph import Subgraph, call_subgraph
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

from .guards import BlockGuards
from .input_sizes import Within

if TYPE_CHECKING:
    from .joint_graph import Capture


_CALLS: ContextVar[Sequence[RegionCall]] = ContextVar("calls of blocks in a trace")

_LIBRARY = torch.library.Library("autosplit_block", "DEF")
_LIBRARY.define("forward(int call, Tensor[] inputs, Tensor state) -> Tensor[]")
_LIBRARY.define("backward_input(int call, Tensor saved, Tensor[] grads) -> Tensor[]")
_LIBRARY.define("backward_weight(int call, Tensor deferred) -> Tensor")

FORWARD: Any = torch.ops.autosplit_block.forward.default
BACKWARD_INPUT: Any = torch.ops.autosplit_block.backward_input.default
BACKWARD_WEIGHT: Any = torch.ops.autosplit_block.backward_weight.default


def new_token() -> Tensor:
    """A tensor that stands for several."""
    return torch.empty(1)


def _forward(call: int, inputs: list[Tensor], state: Tensor) -> list[Tensor]:
    region = _CALLS.get()[call].region
    return [*_like(region, region.returned), new_token()]


def _backward_input(call: int, saved: Tensor, grads: list[Tensor]) -> list[Tensor]:
    region = _CALLS.get()[call].region
    return [*_like(region, region.input_grads), new_token()]


def _backward_weight(call: int, deferred: Tensor) -> Tensor:
    return new_token()


def _like(region: Region, nodes: Mapping[Role, fx.Node]) -> list[Tensor]:
    return [region.empty(node.meta["val"]) for node in nodes.values()]


for _name, _fake in (
    ("forward", _forward),
    ("backward_input", _backward_input),
    ("backward_weight", _backward_weight),
):
    torch.library.register_fake(f"autosplit_block::{_name}", _fake, lib=_LIBRARY)


@contextlib.contextmanager
def tracing_calls(calls: Sequence[RegionCall]) -> Iterator[None]:
    """While the operators stand for these calls, by their places."""
    token = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(token)


STATE_TOKEN = "autosplit_state"
"""Attribute of a block under which a trace finds the token of its parameters and buffers."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Region:
    """One kind of block, for one kind of call: its graphs, as operators of other graphs.

    Attributes:
        name: of the kind, unique in a model.
        args: positional inputs that it was captured for, tensors without memory.
        kwargs: keyword inputs likewise.
        capture: of a block of this kind.
        graphs: what its joint graph was split into.
        within: what sizes in these graphs are in the graph around.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    capture: Capture
    graphs: SplitGraphs
    within: Within

    def empty(self, value: Tensor) -> Tensor:
        """A tensor that lies in memory as one of the graphs does, by the sizes around them."""
        shape, strides = (map(self.within, each) for each in (value.shape, value.stride()))
        return torch.empty_strided([*shape], [*strides], dtype=value.dtype, device=value.device)

    @cached_property
    def parts(self) -> dict[str, Subgraph]:
        """F, I and W by name; those that there are."""
        halves = ("forward", "backward_input", "backward_weight")
        made = {half: self.graphs.graphs().get(half) for half in halves}
        return {h: Subgraph.of(f"{self.name}_{h}", m) for h, m in made.items() if m is not None}

    @cached_property
    def results(self) -> list[Any]:
        """Leaves of what a call returns: constants, and for tensors what makes them in F."""
        made = {role.name: v for role, v in outputs(self.graphs.forward.graph, Kind.OUTPUT)}
        return [made[path] for path in self.capture.outputs]

    @cached_property
    def returned(self) -> dict[Role, fx.Node]:
        """What F computes for the caller, in order."""
        joint = self.graphs.joint.graph
        return {r: v for r, v in outputs(joint, Kind.OUTPUT) if isinstance(v, fx.Node)}

    @cached_property
    def tangents(self) -> dict[Role, fx.Node]:
        """Gradients that I takes, in order."""
        return inputs(self.graphs.joint.graph, Kind.TANGENT)

    @cached_property
    def input_grads(self) -> dict[Role, fx.Node]:
        """Gradients that I returns, in order."""
        joint = self.graphs.joint.graph
        return {r: v for r, v in outputs(joint, Kind.INPUT_GRAD) if isinstance(v, fx.Node)}

    @cached_property
    def taken(self) -> list[Role]:
        """Tensors that the graphs take from the caller, in order."""
        return list(inputs(self.graphs.joint.graph, Kind.INPUT))

    @cached_property
    def state(self) -> dict[Role, fx.Node]:
        """Parameters and buffers that the graphs read."""
        return inputs(self.graphs.joint.graph, *STATE)

    @property
    def trained(self) -> bool:
        """Whether a parameter gets a gradient."""
        return bool(outputs(self.graphs.joint.graph, Kind.PARAMETER_GRAD))

    def sums_differently(self, given: list[Any]) -> bool:
        """Whether gradients of what a call is given would be summed in another order than autograd
        sums them: those of several reads in the block first, and then those of others.

        Args:
            given: leaves of the call's inputs; nodes of Dynamo's graph stand for tensors.
        """
        names = {role.name: value for role, value in self.input_grads.items()}
        for path, leaf in zip(self.capture.inputs, given, strict=True):
            if path in names and isinstance(leaf, fx.Node):
                is_sum = names[path].target is torch.ops.aten.add.Tensor
                if given.count(leaf) > 1 or (is_sum and len(leaf.users) > 1):
                    return True
        return False


@dataclasses.dataclass(eq=False, repr=False)
class RegionCall:
    """One call of a block in the forward of a model; in Dynamo's graph, the function that a node
    calls.

    Attributes:
        number: its place among the calls of one trace.
        region: kind of the block.
        block: that is called.
        name: the block's name in the model.
        guards: what must hold for the block to be called like this.
        refusal: why it cannot be called by itself, once a trace of its backward has found that.
    """

    number: int
    region: Region
    block: nn.Module
    name: str
    guards: BlockGuards
    refusal: str | None = None

    @property
    def __name__(self) -> str:
        return f"call_{self.region.name}"

    def __call__(self, state: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the block returns, for a trace.

        Args:
            state: the token of its parameters and buffers.
            args: positional inputs.
            kwargs: keyword inputs.
        """
        region = self.region
        leaves, _ = tree_flatten((args, kwargs))
        given = dict(zip(region.capture.inputs, leaves, strict=True))
        taken = [given[role.name] for role in region.taken]
        made = _Call.apply(self, state, *taken)  # type: ignore[no-untyped-call]
        found = dict(zip([role.name for role in region.returned], made, strict=True))
        paths = zip(region.capture.outputs, region.results, strict=True)
        results = [found.get(path, leaf) for path, leaf in paths]
        return tree_unflatten(results, region.capture.output_spec)

    def laid_out(self, gradient: Tensor | None, traced: Tensor, result: Tensor) -> Tensor:
        """A gradient of a result with the strides that the block was traced with.

        Refused is one that is not there, as zeros in its place could become NaN in the block, and
        one that lies otherwise in memory, as kernels would round otherwise: unless the result does,
        too, whose operators were decomposed after it was settled how its gradient is to lie.
        """
        # Made anew: the value that the block was traced with is unknown to this trace.
        made = self.region.empty(traced)
        if gradient is None:
            self.refusal = "nobody computes the gradient of one of its results"
        elif gradient.stride() == made.stride():
            return gradient
        elif gradient.is_contiguous() and traced.is_contiguous():
            return gradient.as_strided(made.shape, made.stride())
        elif traced.is_contiguous() and not result.is_contiguous():
            return gradient.contiguous()
        else:
            self.refusal = "the gradient of one of its results is not laid out as that is"
        return made


class _Call(torch.autograd.Function):
    """F of a block, and I and W behind it."""

    @staticmethod
    def forward(ctx: Any, call: RegionCall, state: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        region = call.region
        *results, saved = FORWARD(call.number, list(given), state)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(saved)
        trained = {role.name for role in region.tangents}
        constant = [
            t for r, t in zip(region.returned, results, strict=True) if r.name not in trained
        ]
        ctx.mark_non_differentiable(*constant)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        region: Region = ctx.call.region
        (saved,) = ctx.saved_tensors
        arrived = dict(zip([role.name for role in region.returned], grads, strict=True))
        returned = {role.name: node.meta["val"] for role, node in region.returned.items()}
        given = [
            ctx.call.laid_out(arrived[role.name], node.meta["val"], returned[role.name])
            for role, node in region.tangents.items()
        ]
        *made, deferred = BACKWARD_INPUT(ctx.call.number, saved, given)
        found = dict(zip([role.name for role in region.input_grads], made, strict=True))
        of_state = BACKWARD_WEIGHT(ctx.call.number, deferred) if region.trained else None
        return None, of_state, *[found.get(role.name) for role in region.taken]


def stand_in(call: RegionCall) -> nn.Module:
    """A module with a token in place of the parameters and buffers of a block."""
    made = nn.Module()
    token = nn.Parameter(torch.empty(1), requires_grad=call.region.trained)
    made.register_parameter(STATE_TOKEN, token)
    return made


_NO_WORD = re.compile(r"\W+")


def expand(joint: fx.GraphModule, calls: Sequence[RegionCall], names: Mapping[int, str]) -> None:
    """Replace F, I and W of blocks, as they were traced, by calls of the blocks' graphs.

    Args:
        joint: a joint graph with roles; changed in place.
        calls: by their numbers.
        names: identity of a parameter or buffer -> its name in the model.

    Raises:
        CaptureError: blocks share a parameter, with each other or with what is around.
    """
    _Expansion(joint, calls, names).run()
    joint.graph.eliminate_dead_code(lambda node: node.op in {"placeholder", "output"})
    joint.recompile()


class _Expansion:
    def __init__(
        self, joint: fx.GraphModule, calls: Sequence[RegionCall], names: Mapping[int, str]
    ) -> None:
        self._graph = joint.graph
        self._calls = calls
        self._names = names
        self._mode = next(
            node.meta["val"].fake_mode for node in placeholders(joint.graph) if "val" in node.meta
        )
        self._state: dict[Role, fx.Node] = {}
        self._values: dict[tuple[int, Any], Tensor] = {}
        self._known: dict[int, dict[Role, fx.Node]] = {}
        self._updates: dict[Role, fx.Node] = {}
        self._gradients: dict[str, dict[Role, fx.Node]] = {}

    def run(self) -> None:
        taken = {role_of(node): node for node in placeholders(self._graph)}
        for node in list(self._graph.nodes):
            if node.target is FORWARD:
                self._forward(node, taken)
            elif node.target is BACKWARD_INPUT:
                self._backward_input(node)
            elif node.target is BACKWARD_WEIGHT:
                self._backward_weight(node)
        self._return_all()
        for role, node in taken.items():
            if role.name.endswith(STATE_TOKEN):
                for user in list(node.users):
                    user.replace_input_with(node, None)  # type: ignore[arg-type]
                self._graph.erase_node(node)

    def _forward(self, node: fx.Node, taken: dict[Role, fx.Node]) -> None:
        number, given, _ = node.args
        call = self._calls[number]  # type: ignore[index]
        region = call.region
        known = dict(zip(region.taken, given, strict=True))  # type: ignore[arg-type]
        tensors = {**dict(call.block.named_parameters()), **dict(call.block.named_buffers())}
        for role in region.state:
            outer = Role(role.kind, self._names[id(tensors[role.name])])
            if outer in taken:
                raise CaptureError(f"{outer.name} is used in several places")
            known[role] = taken[outer] = self._placeholder(outer, region, role)
        found = self._call(node, call, "forward", known)
        known |= found
        self._updates |= {
            Role(role.kind, self._names[id(tensors[role.name])]): found[role]
            for role, _ in outputs(region.graphs.joint.graph, Kind.UPDATE)
        }
        self._known[number] = known  # type: ignore[index]
        self._hand_out(node, [known[role] for role in region.returned])

    def _placeholder(self, role: Role, region: Region, inner: Role) -> fx.Node:
        traced = region.state[inner]
        first = next(iter(self._graph.nodes))
        with self._graph.inserting_before(first):
            node = self._graph.placeholder(traced.name)
        node.target = node.name
        node.meta = {"role": role, "val": self._shared(region, inner, traced.meta["val"], region)}
        return node

    def _backward_input(self, node: fx.Node) -> None:
        number, _, grads = node.args
        call, known = self._calls[number], self._known[number]  # type: ignore[index]
        region = call.region
        known |= dict(zip(region.tangents, grads, strict=True))  # type: ignore[arg-type]
        known |= self._call(node, call, "backward_input", known)
        self._hand_out(node, [known[role] for role in region.input_grads])

    def _backward_weight(self, node: fx.Node) -> None:
        number, _ = node.args
        call, known = self._calls[number], self._known[number]  # type: ignore[index]
        found = self._call(node, call, "backward_weight", known)
        tensors = dict(call.block.named_parameters())
        known |= found
        made = {
            Role(role.kind, self._names[id(tensors[role.name])]): known[role]
            for role, _ in outputs(call.region.graphs.joint.graph, Kind.PARAMETER_GRAD)
        }
        self._gradients[f"{call.name}.{STATE_TOKEN}"] = made

    def _call(
        self, node: fx.Node, call: RegionCall, half: str, known: Mapping[Role, fx.Node]
    ) -> dict[Role, fx.Node]:
        """A call of F, I or W in place of a node; its results by role."""
        region = call.region
        part = region.parts[half]
        with self._graph.inserting_before(node):
            given = [known[role] for role in part.given]
            values = [self._shared(part, at, each, region) for at, each in enumerate(part.values)]
            made = call_subgraph(self._graph, part, given, values)
        roles = {at: role for role, at in part.results.items() if isinstance(at, int)}
        for at, each in enumerate(made):
            name = f"{call.name}_{roles[at].name}"
            each.name = self._graph._graph_namespace.create_name(_NO_WORD.sub("_", name), None)
        for each in made:
            maker = each.args[0]
            for new in (each, maker):
                for key in (ORIGIN, "stack_trace"):
                    if key in node.meta:
                        new.meta[key] = node.meta[key]  # type: ignore[union-attr]
        return {
            role: made[at] if isinstance(at, int) else known[at]
            for role, at in part.results.items()
        }

    def _shared(self, of: object, at: Any, traced: Any, region: Region) -> Any:
        """A fake tensor of this trace, in memory as large as in the region: one for all calls, as
        tensors without data are told apart by nodes. What the region counts, by the sizes here.
        """
        if not isinstance(traced, Tensor):
            return region.within(traced)
        key = id(of), at
        if key not in self._values:
            size = region.within(traced.untyped_storage().nbytes()) // traced.element_size()
            offset = region.within(traced.storage_offset())
            with self._mode:
                lying = region.empty(traced)
                memory = torch.empty(size, dtype=traced.dtype, device=traced.device)
                self._values[key] = memory.as_strided(lying.shape, lying.stride(), offset)
        return self._values[key]

    @staticmethod
    def _hand_out(node: fx.Node, values: Sequence[fx.Node]) -> None:
        """Have what reads results of a node read others, but for its token."""
        for user in list(node.users):
            at: Any = user.args[1] if user.target is operator.getitem else None
            if at is not None and at < len(values):
                user.replace_all_uses_with(values[at])

    def _return_all(self) -> None:
        found: dict[Role, Any] = {**self._updates}
        for role, value in outputs(self._graph):
            expanded = self._gradients.get(role.name)
            found |= {role: value} if expanded is None else expanded
        output = self._graph.output_node()
        output.args = (list(found.values()),)
        output.meta["roles"] = tuple(found)
