"""``expand``: calls of blocks in a joint graph, from tokens to all tensors that they stand for."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.errors import CaptureError
from autosplit.passes import Kind, Role
from autosplit.passes.graph import ORIGIN, outputs, placeholders, role_of
from autosplit.passes.subgraph import call_subgraph

from .region import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, STATE_TOKEN, Region, RegionCall

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
