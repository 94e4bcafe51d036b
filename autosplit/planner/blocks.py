"""Divide a model into blocks: ranges of operations, with cuts between them where few bytes
cross.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autosplit.capture.module_paths import common, stack
from autosplit.passes.analysis.operator_cost import value_bytes
from autosplit.planner.operation_sequence import OperationSequence


@dataclass(frozen=True)
class Block:
    """A range of operations that is never cut.

    Attributes:
        name: the outermost module that starts with the block; if none does, the enclosing module
            and the first operation, such as ``encoder:add_3``. Names are unique.
        signature: equal for blocks with the same operations on tensors of the same shapes.
        first: position of the block's first operation in the sequence.
        last: position of the next block's first operation.
    """

    name: str
    signature: str
    first: int
    last: int


def find_cuts(line: OperationSequence, wanted: Collection[int] = ()) -> list[int]:
    """Return the places where a model may be cut, in order.

    Between two heavy operations there is at most one candidate: the place where the fewest tensors,
    then the fewest bytes, cross the cut. Of equal places, a module's boundary wins, the outermost
    module first. The module must be larger than one operation and smaller than half the model.

    A candidate becomes a cut in two cases. More tensors cross the neighbouring candidates on both
    sides, as between attention and MLP of a residual layer; or the candidate separates two modules
    with several heavy operations each, such as the levels of a U-Net.

    Args:
        line: the operations of the model.
        wanted: cuts that are returned in any case.
    """
    stacks = [stack(node) for node in line.body]
    heavy = [index for index, node in enumerate(line.body) if _is_heavy(line, node)]
    weight = Counter(stacks[at][:depth] for at in heavy for depth in range(len(stacks[at]) + 1))
    count, size = _widths(line)

    def rank(cut: int) -> tuple[int, int, bool, int, int]:
        sides = stacks[cut - 1], stacks[cut]
        depth = len(common(*sides))
        paths = [side[:end] for side in sides for end in range(depth + 1, len(side) + 1)]
        inner = not any(1 < weight[path] < len(heavy) / 2 for path in paths)
        return count[cut], size[cut], inner, depth, -cut

    def divides(left: int, right: int) -> bool:
        depth = len(common(stacks[left], stacks[right])) + 1
        sides = stacks[left][:depth], stacks[right][:depth]
        return sides[0] != sides[1] and all(weight[side] > 1 for side in sides)

    places: list[int] = []
    cuts = set(wanted)
    for left, right in pairwise(heavy):
        able = [k for k in range(left + 1, right + 1) if k not in line.forbidden]
        lookups = not (line.effects[line.body[left]].heavy or line.effects[line.body[right]].heavy)
        if able and not lookups:
            chosen = [k for k in able if k in cuts]
            places += chosen or [min(able, key=rank)]
            if not chosen and divides(left, right):
                cuts.add(places[-1])
    runs = [[*run] for _, run in groupby(places, count.__getitem__)]
    widths = [math.inf, *(count[run[0]] for run in runs), math.inf]
    for width_before, run, width_after in zip(widths, runs, widths[2:], strict=False):
        if count[run[0]] < min(width_before, width_after):
            cuts.update(run)
    return sorted(cuts)


def make_blocks(line: OperationSequence, cuts: Sequence[int]) -> tuple[Block, ...]:
    """The blocks between these cuts."""
    ends = {path: index for index, node in enumerate(line.body) for path in stack(node)}
    seen: Counter[str] = Counter()
    blocks = []
    for first, last in pairwise([0, *cuts, len(line.body)]):
        nodes, outside = line.part(first, last)
        name = _name(line, first, ends)
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}:{line.body[first].name}"
        later = {n for n in nodes if line.last_use.get(n, -1) >= last}
        signature = signature_of(line, nodes, outside, later)
        blocks.append(Block(name, signature, first, last))
    return tuple(blocks)


def _is_heavy(line: OperationSequence, node: fx.Node) -> bool:
    forward = line.forward
    read = (n for n in node.all_input_nodes if forward.state.get(n) in forward.parameters)
    return line.effects[node].heavy or any(line.value(n).dim() > 1 for n in read)


def _widths(line: OperationSequence) -> tuple[list[int], list[int]]:
    """For every cut: ([number of tensors that cross it], [their bytes])."""
    counts, sizes = ([0] * (len(line.body) + 2) for _ in range(2))
    for index, node in enumerate(line.body):
        end = max(line.last_use[node], index) + 1
        size = sum(value_bytes(t) for t in [line.value(node)] if isinstance(t, Tensor))
        for changes, amount in ((counts, 1), (sizes, size)):
            changes[index + 1] += amount
            changes[end] -= amount
    return [*accumulate(counts)], [*accumulate(sizes)]


def _name(line: OperationSequence, first: int, ends: dict[str, int]) -> str:
    """The name of the outermost module that starts at ``first`` and has less than half of the
    operations.
    """
    path = stack(line.body[first])
    previous = stack(line.body[first - 1]) if first else ()
    starts = path[len(common(previous, path)) :]
    if not starts:
        return f"{path[-1] if path else 'forward'}:{line.body[first].name}"
    parts = [name for name in starts if 2 * (ends[name] - first) < len(line.body)]
    return parts[0] if parts else starts[-1]


def signature_of(
    line: OperationSequence,
    nodes: Sequence[fx.Node],
    outside: Sequence[fx.Node],
    results: Collection[fx.Node],
    names: Sequence[str] = (),
) -> str:
    """A digest of a block: its operations, the values that they read, which results are read
    outside of it, and ``names``. It is valid within this process only, because it contains the
    ``id`` of functions.
    """
    number = {node: f"%{index}" for index, node in enumerate([*outside, *nodes])}

    def number_leaf(leaf: Any) -> Any:
        is_size = leaf not in number and isinstance(leaf, fx.Node)
        return str(line.value(leaf)) if is_size else number.get(leaf, leaf)

    def text(value: Any) -> str:
        return repr(map_aggregate(value, number_leaf))

    parts = [*names, *(_look(line, node) for node in outside)]
    for node in nodes:
        setting = line.settings[node]
        casts = [text(enter.args) for enter in setting.autocasts]
        parts.append(
            f"{node.target!r} {text(node.args)} {text(node.kwargs)} {setting.grad} {casts} "
            f"{node in results}"
        )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _look(line: OperationSequence, node: fx.Node) -> str:
    """A description of a node outside the block that the block reads."""
    value = line.value(node)
    if not isinstance(value, Tensor):
        return str(getattr(value, "code", value))
    kind = "state" if node in line.forward.state else "tensor"
    form = f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
    if node in line.forward.constants:
        form += f" constant {id(line.forward.constants[node])}"
    return f"{kind} {form} {value.requires_grad}"
