"""The division of the joint graph into F, I and W as a minimum cut over two boundaries.

            F  |  I  |  W          a saved tensor crosses the first boundary,
        -------+-----+------       a deferred tensor crosses the second,
          first  second            a tensor that W reads from F crosses both

Both boundaries are chosen together. Each boundary is a layer of one flow network, in which every
node has an "in" and an "out" half:

| half | source's side | sink's side |
|---|---|---|
| in | the node runs before the boundary, or not at all | it runs after the boundary |
| out | its value is not needed after the boundary | its value exists after the boundary |

A node with "in" on the source's side and "out" on the sink's is carried over the boundary, at the
price of the storage that it keeps alive. A node that runs after a boundary needs its operands
there. A forward value that exists in W also exists in I, so an edge connects its halves in the two
layers. Running a cheap node on both sides costs time; other nodes must not run twice. So the
minimum cut is the optimum. Torch's partitioner uses the same reduction (after Chen et al., arXiv
1604.06174) for one boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import fx

from ..analysis.aliasing import is_free, producer, storage_bytes, storage_root
from ..analysis.operator_cost import effort, is_cheap, recompute_cost
from ..analysis.operators import checkpoint_region, is_random, is_under_way
from ..errors import InfiniteCutError, PassError
from ..graph import Region, Regions, is_size, source_line, tensor_of, value_text
from ..memory_policy import Price
from .min_cut import FIRST, SINK, SOURCE, Network
from .reachability import Reachability

_SIZE_BYTES = 8  # of a symbolic size that crosses
_SPREAD = 0.05


class Division:
    """The flow network of one joint graph; it can be cut at several Lagrange multipliers.

    Args:
        graph: the joint graph.
        reach: sets of the graph's nodes, by the results that need them.
        recompute: whether cheap nodes may run on both sides of a boundary.
        release: whether I may compute and return weight gradients.
    """

    def __init__(
        self, graph: fx.Graph, reach: Reachability, *, recompute: bool, release: bool
    ) -> None:
        self._reach = reach
        self._recompute = recompute
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._early_candidates = reach.early_candidates if release else set()
        self._network = Network()
        self._in_first: set[fx.Node] = set()
        # Computed once: a set per node would take quadratic time.
        self._settled = reach.forward - reach.recomputed
        self._add_needs_of_backward()
        self._add_second_layer()

    def minimum_cut(self, rate: float = 0.0, charge: float = 0.0) -> Regions:
        """The division of the joint graph at a minimum cut.

        Args:
            rate: bytes per unit of recomputation time.
            charge: bytes per FLOP of a weight gradient in I.

        Raises:
            PassError: the backward needs a value that can neither be carried nor recomputed. The
                error names the value, and the node that needs it, with the user's lines.
        """
        try:
            early, price = self._network.minimum_cut(
                lambda p: p.bytes + rate * p.time + charge * p.flops
            )
        except InfiniteCutError as error:
            raise PassError(self._infinite_cut(error.path)) from error
        first, second = self._cut_nodes(early, _first), self._cut_nodes(early, _second)
        reach = self._reach
        waiting, _ = walk(reach.weight_grads, second)
        computed = self._early_candidates - waiting
        early_weight_grads = {node for node in reach.weight_grads if storage_root(node) in computed}
        return _regions(self._order, reach, (first, second), early_weight_grads, price)

    def _infinite_cut(self, path: Sequence[int]) -> str:
        """The error text for a path over which every cut is infinite. It names the path's first and
        last node.
        """
        nodes = list(self._order)
        first, last = (nodes[(half - FIRST) // 4] for half in (path[1], path[-2]))
        needed = "" if first is last else f", from which it computes {_described(last)}"
        return (
            "the backward needs a value that can neither be carried nor recomputed: "
            f"{_described(first)}{needed}. Tensors and sizes can be carried from one graph to the "
            "next, and cheap operators without random numbers can be recomputed: compute a tensor "
            "there, or leave this part of the model unsplit"
        )

    def _cut_nodes(self, early: Collection[int], layer: Callable[[int], int]) -> set[fx.Node]:
        halves = ((node, layer(index)) for node, index in self._order.items())
        return {node for node, half in halves if half in early and half + 1 not in early}

    def _add_needs_of_backward(self) -> None:
        """Build the first layer: the forward values that the backward reads."""
        reach = self._reach
        results = [*reach.input_grads, *reach.weight_grads]
        read = [n for node in walk(results, ())[0] & reach.gradient for n in node.all_input_nodes]
        for node in {*results, *read} - reach.gradient:
            self._network.add_edge(_first(self._order[node]) + 1, SINK)
            self._add_to_first_layer(node)

    def _add_to_first_layer(self, start: fx.Node) -> None:
        """Add a node, and the nodes from which it may be recomputed, to the first layer."""
        reach, stack = self._reach, [start]
        while stack:
            node = stack.pop()
            if node in self._in_first:
                continue
            self._in_first.add(node)
            half = _first(self._order[node])
            self._network.add_edge(
                half, half + 1, None if node in reach.recomputed else self._price(node)
            )
            self._tie(node, _first, early=node in self._settled)
            stack.extend(node.all_input_nodes)

    def _add_second_layer(self) -> None:
        reach = self._reach
        for node in reach.weight_grads:
            self._network.add_edge(_second(self._order[node]) + 1, SINK)
        for node in walk(reach.weight_grads, ())[0]:
            index = self._order[node]
            half = _second(index)
            self._network.add_edge(half, half + 1, self._price(node))
            if node in reach.late:
                self._network.add_edge(half, SINK)
            early = node in reach.input_grad_closure or node in self._settled
            self._tie(node, _second, early=early)
            if node not in reach.gradient:
                self._add_to_first_layer(node)
                self._network.add_edge(_first(index) + 1, half + 1)
            if early or is_free(node) or node.op == "placeholder":
                continue
            if node not in reach.gradient and node not in reach.recomputed:
                self._network.add_edge(_first(index), half, self._price_recompute(node))
            if not reach.input_grad_closure or not is_cheap(node):
                # The first layer decides whether it runs in F.
                beyond = SINK if node in reach.gradient else _first(index)
                self._network.add_edge(half, beyond, self._price_early(node))

    def _tie(self, node: fx.Node, layer: Callable[[int], int], *, early: bool) -> None:
        """Add the edges between a node and its operands in one layer.

        If ``early``, the node runs before the boundary in any case; running it after the boundary
        recomputes it.
        """
        half = layer(self._order[node])
        for operand in node.all_input_nodes:
            self._network.add_edge(layer(self._order[operand]) + 1, half)
        if is_free(node) or (node in self._reach.recomputed and layer is _first):
            return
        if early or node.op == "placeholder" or is_random(node):
            self._network.add_edge(SOURCE, half, self._price_recompute(node))
            return
        # Running a node before the boundary needs its operands there. An operand that also runs
        # after the boundary runs twice.
        for operand in {producer(value_node) for value_node in node.all_input_nodes}:
            if not is_free(operand) and not (operand in self._reach.recomputed and layer is _first):
                price = self._price_recompute(operand)
                if price is not None and not self._ready(operand, layer):
                    price = None
                self._network.add_edge(half, layer(self._order[operand]), price)

    def _ready(self, node: fx.Node, layer: Callable[[int], int]) -> bool:
        """Whether all operands of the node exist before the boundary in any case. The node can then
        also run before the boundary without moving another node there.
        """
        return all(self._is_before(producer(operand), layer) for operand in node.all_input_nodes)

    def _is_before(self, node: fx.Node, layer: Callable[[int], int]) -> bool:
        if is_free(node) or node.op == "placeholder":
            return True
        if layer is _first:
            return node in self._reach.forward and node not in self._reach.recomputed
        return node in self._reach.input_grad_closure or node not in self._reach.gradient

    def _price(self, node: fx.Node) -> Price | None:
        """Price of carrying a node's value over a boundary; None if it cannot be carried.

        State that the module keeps, and a weight gradient that I returns, cost nothing. A view
        costs a byte more than its base, so that the base is carried and the view recomputed.
        """
        if is_size(node):
            return Price(_SIZE_BYTES)
        if tensor_of(node) is None or is_under_way(node):
            return None
        root = storage_root(node)
        free = self._reach.is_kept(root) or root in self._early_candidates
        return Price((0 if free else storage_bytes(root)) + (node is not root))

    def _price_early(self, node: fx.Node) -> Price | None:
        """Price of running a node in I that W could run; None if it must be deferred."""
        return Price(flops=self._spread(node, effort(node))) if self._early_candidates else None

    def _spread(self, node: fx.Node, cost: float) -> float:
        """The cost, made slightly smaller for nodes early in the graph. A cut may then divide the
        equal layers of a model between both sides, instead of treating all layers alike.
        """
        return cost * (1 + _SPREAD * self._order[node] / len(self._order))

    def _price_recompute(self, node: fx.Node) -> Price | None:
        """Price of running a node on both sides of a boundary; None if it must not run twice."""
        if checkpoint_region(node) is not None and node not in self._reach.recomputed:
            return None  # recomputation in a region starts from the values that leave earlier ones
        time = recompute_cost(node) if self._recompute else None
        return None if time is None or is_random(node) else Price(time=self._spread(node, time))


def _described(node: fx.Node) -> str:
    """Text for errors: the node, its operator, its value, and the user's line."""
    line = source_line(node)
    target = f" = {node.target}" if node.op == "call_function" else ""
    value = value_text(node.meta.get("val"))
    return f"{node.name}{target} ({value}{', at ' + line if line else ''})"


def with_early_weight_grads(
    graph: fx.Graph, reach: Reachability, regions: Regions, more: Collection[fx.Node]
) -> Regions:
    """A copy of ``regions`` in which I also computes and returns the weight gradients ``more``."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    return _regions(
        order, reach, regions.cuts, regions.early_weight_grads.union(more), regions.price
    )


def _regions(
    order: Mapping[fx.Node, int],
    reach: Reachability,
    cuts: tuple[set[fx.Node], set[fx.Node]],
    early_weight_grads: set[fx.Node],
    price: Price,
) -> Regions:
    # Every graph takes all symbolic sizes. Inductor needs them: from a boundary tensor whose shape
    # is a product of two sizes it could derive neither.
    sizes = {node for node in order if node.op == "placeholder" and is_size(node)}

    def region(wanted: Iterable[fx.Node], carried: set[fx.Node], new: set[fx.Node]) -> Region:
        runs, live_ins = walk([*wanted, *sizes], carried | sizes)
        return Region(runs, sorted(live_ins, key=order.__getitem__), frozenset(runs - new))

    first, second = cuts
    late = [node for node in reach.weight_grads if node not in early_weight_grads]
    weight = region(late, second, reach.gradient - reach.input_grad_closure)
    handed = [node for node in weight.live_ins if not reach.is_kept(node)]
    early = [node for node in reach.weight_grads if node in early_weight_grads]
    return Regions(
        backward=region([*reach.input_grads, *reach.weight_grads], first, reach.gradient),
        input=region([*reach.input_grads, *early, *handed], first, reach.gradient),
        weight=weight,
        early_weight_grads=early_weight_grads,
        price=price,
        kept={node for node in order if reach.is_kept(node)},
        cuts=cuts,
    )


def _first(index: int) -> int:
    """Vertex of the flow network for the "in" half of node ``index`` in the first of two layers.
    The vertex of the "out" half has the next number.
    """
    return FIRST + 4 * index


def _second(index: int) -> int:
    return _first(index) + 2


def walk(
    wanted: Iterable[fx.Node], carried: Collection[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return (nodes that must run to compute ``wanted``, carried values that these nodes read)."""
    late: set[fx.Node] = set()
    used: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in carried:
            used.add(node)
        elif node not in late:
            late.add(node)
            stack.extend(node.all_input_nodes)
    return late, used
