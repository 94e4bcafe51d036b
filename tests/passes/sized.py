"""Joint graphs written down by hand, with a size for every value, and their brute-force cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import fx, nn

from autosplit.passes import Role
from autosplit.passes.analysis.aliasing import distinct_bytes
from autosplit.passes.analysis.operator_cost import is_cheap
from autosplit.passes.graph import Kind, Regions
from autosplit.passes.partition.reachability import Reachability
from autosplit.passes.partition.regions import Division

aten = torch.ops.aten


class Sized:
    """Builds a joint graph. Sizes are in bytes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._results: list[tuple[Role, fx.Node]] = []

    def input(self, size: int, kind: Kind = Kind.INPUT) -> fx.Node:
        node = self.graph.placeholder(f"in{len(self.graph.nodes)}")
        node.meta["role"] = Role(kind, node.name)
        return self._sized(node, size)

    def tangent(self, size: int = 1) -> fx.Node:
        return self.input(size, Kind.TANGENT)

    def cheap(self, size: int, *operands: fx.Node) -> fx.Node:
        return self._sized(self.graph.call_function(aten.cat.default, (list(operands),)), size)

    def costly(self, size: int, *operands: fx.Node) -> fx.Node:
        """Add an operator that is neither recomputed nor moved out of W."""
        node = self.graph.call_function(aten.meshgrid.default, (list(operands),))
        return self._sized(node, size)

    def view(self, operand: fx.Node) -> fx.Node:
        node = self.graph.call_function(aten.view.default, (operand, [-1]))
        node.meta["val"] = operand.meta["val"].view(-1)
        return node

    def result(self, kind: Kind, node: fx.Node) -> None:
        self._results.append((Role(kind, f"r{len(self._results)}"), node))

    def module(self) -> fx.GraphModule:
        output = self.graph.output([node for _, node in self._results])
        output.meta["roles"] = tuple(role for role, _ in self._results)
        return fx.GraphModule(nn.Module(), self.graph)

    def cut(
        self,
        *,
        recompute: bool = False,
        release: bool = False,
        rate: float = 0.0,
        charge: float = 0.0,
    ) -> Regions:
        graph = self.module().graph
        return Division(
            graph, Reachability.of(graph), recompute=recompute, release=release
        ).minimum_cut(rate, charge)

    @staticmethod
    def _sized(node: fx.Node, size: int) -> fx.Node:
        node.meta["val"] = torch.empty(size, dtype=torch.int8, device="meta")
        return node


def held(regions: Regions) -> int:
    return distinct_bytes(regions.saved) + distinct_bytes(regions.deferred)


def least_held(graph: fx.Graph, *, recompute: bool) -> int:
    """The fewest bytes over both boundaries, by trying every way to run every node."""
    reach = Reachability.of(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    wanted = {*reach.input_grads, *reach.weight_grads}
    best = None
    for choice in itertools.product(*(list(_places(node, reach, recompute)) for node in nodes)):
        runs = [{n for n, place in zip(nodes, choice, strict=True) if at in place} for at in "FIW"]
        sizes = _boundaries(runs, reach, wanted)
        best = sizes if best is None or sizes < best else best
    if best is None:
        raise ValueError("there is no way to run this graph")
    return best


def _places(node: fx.Node, reach: Reachability, recompute: bool) -> Iterator[str]:
    """The sets of graphs that may run a node; "" for none."""
    recompute = recompute and is_cheap(node)
    input_grad_closure, forward = node in reach.input_grad_closure, node in reach.forward
    for place in ("", "F", "I", "W", "FI", "FW", "IW", "FIW"):
        if (
            (len(place) <= 1 or recompute)
            and ("F" in place or not forward)
            and not ("F" in place and node in reach.gradient)
            and (not input_grad_closure or place != "W" or forward)
            and (is_cheap(node) or input_grad_closure or forward or place in ("", "F", "W"))
        ):
            yield place


def _boundaries(runs: list[set[fx.Node]], reach: Reachability, wanted: set[fx.Node]) -> float:
    """Bytes over both boundaries, infinite where something is missing."""
    forward, inner, weight = runs
    deferred = _missing(weight, reach.weight_grads)
    kept = _missing(inner, [*reach.input_grads, *deferred])
    saved = [node for node in kept if not _is_tangent(node)]
    ready = forward | {node for node in saved if node.op == "placeholder"}
    lost = {*saved} - ready or {n for n in _missing(forward, []) if n.op != "placeholder"}
    if lost or any(_is_tangent(node) for node in _missing(forward, [])):
        return float("inf")
    return distinct_bytes(saved) + distinct_bytes(deferred)


def _missing(runs: set[fx.Node], wanted: list[fx.Node]) -> list[fx.Node]:
    read = {operand for node in runs for operand in node.all_input_nodes}
    return [node for node in {*read, *wanted} if node not in runs]


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"].kind is Kind.TANGENT
