"""W of several microbatches as one call over concatenated factors, an ablation of the paper, as a
pass over the W of a stage.

The sum of products over microbatches is the product of the concatenated factors:
``sum(a[j] @ b[j]) == cat(a, 1) @ cat(b, 0)``. Factors are concatenated where their product is, so
that only one layer's are there twice at a time, and what comes before is computed a microbatch at
a time. Gradients of other operators are added up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

import autosplit
from autosplit.passes.graph import (
    Kind,
    Role,
    copy_placeholder,
    is_state,
    module_like,
    outputs,
    placeholders,
    role_of,
    set_outputs,
)
from autosplit.passes.rewrites.emit import eliminate_dead_code, emit

from ..pipeline.turns import take_turns
from ..results import Rows, ratios, table
from .settings import Settings
from .stages import middle

aten = torch.ops.aten

COUNTS = (2, 4)
WARM_UP = 3  # rounds

_AXES: Mapping[Any, tuple[int, int]] = {aten.mm.default: (1, 0), aten.bmm.default: (2, 1)}
"""Product -> the dimension of each factor that is summed over."""


def concatenate(weight: fx.GraphModule, count: int) -> fx.GraphModule:
    """W of ``count`` microbatches: takes the tensors deferred by each, and parameters and buffers
    once, and returns the sums of their gradients.
    """
    graph = fx.Graph()
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
    for node in weight.graph.nodes:
        if node.op == "placeholder":
            once = copy_placeholder(graph, node) if is_state(node) else None
            for at, own in enumerate(copies):
                role = Role(role_of(node).kind, f"{role_of(node).name}@{at}")
                own[node] = once or copy_placeholder(graph, node, role)
        elif node.op != "output":
            for own in copies:
                own[node] = graph.node_copy(node, own.__getitem__)
    results = [(role, value) for role, value in outputs(weight.graph) if value is not None]
    set_outputs(graph, results, {value: _total(graph, value, copies) for _, value in results})
    eliminate_dead_code(graph)
    return module_like(weight, graph, f"of_{count}_microbatches")


def _total(graph: fx.Graph, node: Any, copies: Sequence[Mapping[fx.Node, fx.Node]]) -> fx.Node:
    """The sum of a value over microbatches: through transposes, of a product by one product."""
    if node.target is aten.t.default:
        return emit(graph, node, node.target, _total(graph, node.args[0], copies))
    if node.target in _AXES:
        sides = zip(node.args, _AXES[node.target], strict=True)
        return emit(graph, node, node.target, *(_cat(graph, *side, copies) for side in sides))
    total, *others = (own[node] for own in copies)
    for other in others:
        total = emit(graph, node, aten.add.Tensor, total, other)
    return total


def _cat(
    graph: fx.Graph, node: Any, axis: int, copies: Sequence[Mapping[fx.Node, fx.Node]]
) -> fx.Node:
    """A factor of all microbatches. A transposed one is concatenated as it lies in memory."""
    if node.target is aten.t.default:
        return emit(graph, node, node.target, _cat(graph, node.args[0], 1 - axis, copies))
    return emit(graph, node, aten.cat.default, [own[node] for own in copies], axis)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family and count, one thread; both ways take turns."""
    torch.set_num_threads(1)
    for family in settings.families:
        subject = middle(family, settings)
        stage = autosplit.Stage(subject.module, [subject.x.detach().requires_grad_()])
        first = stage.functions.source("backward_weight")
        later = stage.functions.source("backward_weight", adds=True)
        for count in COUNTS:
            batches = [_arguments(first.graph) for _ in range(count)]
            ways: dict[str, Callable[[], Sequence[Tensor]]] = {
                "one by one": partial(_one_by_one, first, later, batches),
                "concatenated": partial(_together, concatenate(first, count), batches),
            }
            turns = {name: partial(_timed, way) for name, way in ways.items()}
            yield {
                "name": f"{family}, {count} microbatches",
                "seconds": take_turns(turns, settings.rounds, WARM_UP),
                "gap": _gap(*(way() for way in ways.values())),
            }


def _arguments(graph: fx.Graph) -> dict[Role, Tensor]:
    """Tensors that lie in memory as the deferred ones do."""
    found = {}
    for node in placeholders(graph):
        fake = node.meta["val"]
        real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        found[role_of(node)] = real.normal_() if real.is_floating_point() else real.zero_()
    return found


def _one_by_one(
    first: fx.GraphModule, later: fx.GraphModule, batches: Sequence[Mapping[Role, Tensor]]
) -> Sequence[Tensor]:
    lent = {each.untyped_storage().data_ptr() for each in batches[0].values()}
    sums = [
        each.clone() if each.untyped_storage().data_ptr() in lent else each
        for each in first(*batches[0].values())
    ]
    named = {role.name: s for (role, _), s in zip(outputs(first.graph), sums, strict=True)}
    taken = [role_of(node) for node in placeholders(later.graph)]
    for batch in batches[1:]:
        made = later(*(named[r.name] if r.kind is Kind.ACCUMULATOR else batch[r] for r in taken))
        if later is first:  # small ones are added behind the graph
            torch._foreach_add_(sums, list(made))
    return sums


def _together(joint: fx.GraphModule, batches: Sequence[Mapping[Role, Tensor]]) -> Sequence[Tensor]:
    found = dict(batches[0])  # parameters and buffers
    for at, batch in enumerate(batches):
        found |= {Role(role.kind, f"{role.name}@{at}"): each for role, each in batch.items()}
    sums: Sequence[Tensor] = joint(*(found[role_of(node)] for node in placeholders(joint.graph)))
    return sums


def _timed(way: Callable[[], object]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def _gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Distance of gradients, over their norm."""
    far = sum(float((a - b).norm()) ** 2 for a, b in zip(ours, theirs, strict=True))
    return float((far / sum(float(a.norm()) ** 2 for a in ours)) ** 0.5)


def render(rows: Rows) -> str:
    """Milliseconds one by one, the ratio, and how far gradients are from each other."""
    cells = []
    for row in rows:
        one, joined = row["seconds"]["one by one"], row["seconds"]["concatenated"]
        cells.append(
            [
                row["name"],
                f"{1e3 * median(one):.1f}",
                f"{median(ratios(joined, one)):.3f}",
                f"{row['gap']:.0e}",
            ]
        )
    return table(["W of", "one by one, ms", "concatenated / one by one", "distance"], cells)
