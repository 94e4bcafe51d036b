"""Blocks of a model: what lies between the places where a cut sends little."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
        name: the outermost module that starts here; where none does, the module that it is in
            and the first operation, as ``encoder:add_3``. No two blocks have one name.
        signature: equal for blocks that do the same on tensors of the same shapes.
        first: where in the sequence it starts.
        last: where the next one starts.
    """

    name: str
    signature: str
    first: int
    last: int


def find_cuts(line: OperationSequence, wanted: Iterable[int] = ()) -> list[int]:
    """Where to cut at most: one place at best between two operations that compute much, where
    fewest tensors and bytes are alive.

    Such a place counts where no more tensors cross it than cross the edges of the modules around
    it, as between attention and MLP of a layer with a residual, and not inside either; outside of
    such modules, where no more cross than at the narrowest place; or between two modules that
    compute much each, as the levels of a U-Net do, whatever crosses.

    Args:
        line: the model.
        wanted: cuts to have in any case.
    """
    return _Search(line).cuts(set(wanted))


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
        signature = _signature(line, nodes, outside, last)
        blocks.append(Block(name, signature, first, last))
    return tuple(blocks)


class _Search:
    def __init__(self, line: OperationSequence) -> None:
        self.line = line
        self.stacks = [stack(node) for node in line.body]
        self.heavy = [index for index, node in enumerate(line.body) if _is_heavy(line, node)]
        self.computes = [line.effects[node].heavy for node in line.body]
        self.count, self.bytes = _widths(line)
        self.extent: dict[tuple[str, ...], tuple[int, int]] = {(): (0, len(line.body))}
        for index, path in enumerate(self.stacks):
            for depth in range(1, len(path) + 1):
                first, _ = self.extent.get(path[:depth], (index, index))
                self.extent[path[:depth]] = (first, index + 1)
        self.weight = Counter(
            self.stacks[index][:depth]
            for index in self.heavy
            for depth in range(len(self.stacks[index]) + 1)
        )

    def cuts(self, wanted: set[int]) -> list[int]:
        best = {}
        for left, right in pairwise(self.heavy):
            places = [k for k in range(left + 1, right + 1) if k not in self.line.forbidden]
            lookups = not (self.computes[left] or self.computes[right])
            if places and not lookups:
                best[left, right] = min(places, key=self._rank)
        loose = [self.count[cut] for gap, cut in best.items() if not self._limits(*gap)]
        least = min(loose, default=1)
        found = set(wanted)
        for (left, right), cut in best.items():
            narrow = self.count[cut] <= min(self._limits(left, right), default=least)
            given = any(left < k <= right for k in wanted)
            if not given and (narrow or self._divides(left, right)):
                found.add(cut)
        return sorted(found)

    def _rank(self, cut: int) -> tuple[int, int, bool, int, int]:
        """Few tensors, few bytes, and a boundary of modules: of those that are a part of the
        model rather than one operation or most of it, then as far out as can be.
        """
        sides = self.stacks[cut - 1], self.stacks[cut]
        depth = len(common(*sides))
        paths = [side[:end] for side in sides for end in range(depth + 1, len(side) + 1)]
        inner = not any(self.weight[path] > 1 and self._is_part(path) for path in paths)
        return self.count[cut], self.bytes[cut], inner, depth, -cut

    def _is_part(self, path: tuple[str, ...]) -> bool:
        return 2 * self.weight[path] < len(self.heavy)

    def _limits(self, left: int, right: int) -> list[int]:
        """How many tensors cross the edges of every module around both that is a part of the
        model; without any, the narrowest cuts of the model are what counts.
        """
        around = common(self.stacks[left], self.stacks[right])
        parts = (around[:depth] for depth in range(1, len(around) + 1))
        return [
            max(1, *(self.count[edge] for edge in self.extent[path]))
            for path in parts
            if self._is_part(path)
        ]

    def _divides(self, left: int, right: int) -> bool:
        around = common(self.stacks[left], self.stacks[right])
        depth = len(around) + 1
        sides = [self.stacks[left][:depth], self.stacks[right][:depth]]
        big = [len(side) == depth and self.weight[side] > 1 for side in sides]
        return sides[0] != sides[1] and (all(big) if self._is_part(around) else any(big))


def _is_heavy(line: OperationSequence, node: fx.Node) -> bool:
    def is_matrix(n: fx.Node) -> bool:
        return _is_parameter(line, n) and line.value(n).dim() > 1

    return line.effects[node].heavy or any(map(is_matrix, node.all_input_nodes))


def _is_parameter(line: OperationSequence, node: fx.Node) -> bool:
    return line.forward.state.get(node) in line.forward.parameters


def _widths(line: OperationSequence) -> tuple[list[int], list[int]]:
    """For every cut, how many tensors cross it, and how many bytes."""
    counts, sizes = ([0] * (len(line.body) + 2) for _ in range(2))
    for index, node in enumerate(line.body):
        end = max(line.last_use[node], index) + 1
        size = sum(value_bytes(t) for t in [line.value(node)] if isinstance(t, Tensor))
        for changes, amount in ((counts, 1), (sizes, size)):
            changes[index + 1] += amount
            changes[end] -= amount
    return [*accumulate(counts)], [*accumulate(sizes)]


def _name(line: OperationSequence, first: int, ends: dict[str, int]) -> str:
    """The outermost module that starts here and is no more than half of the model."""
    path = stack(line.body[first])
    before = stack(line.body[first - 1]) if first else ()
    starts = path[len(common(before, path)) :]
    if not starts:
        return f"{path[-1] if path else 'forward'}:{line.body[first].name}"
    parts = [name for name in starts if 2 * (ends[name] - first) < len(line.body)]
    return parts[0] if parts else starts[-1]


def _signature(
    line: OperationSequence, nodes: list[fx.Node], outside: list[fx.Node], last: int
) -> str:
    """A digest of the operations, of what they read, and of what is read of them later; of this
    process, in which a function is what it is.
    """
    number = {node: f"%{index}" for index, node in enumerate([*outside, *nodes])}

    def text(value: Any) -> str:
        return repr(
            map_aggregate(value, lambda leaf: number[leaf] if isinstance(leaf, fx.Node) else leaf)
        )

    parts = [_look(line, node) for node in outside]
    for node in nodes:
        setting = line.settings[node]
        casts = [text(enter.args) for enter in setting.autocasts]
        later = line.last_use.get(node, -1) >= last
        parts.append(
            f"{node.target!r} {text(node.args)} {text(node.kwargs)} {setting.grad} {casts} {later}"
        )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _look(line: OperationSequence, node: fx.Node) -> str:
    """What a node outside of the block is for those inside it."""
    value = line.value(node)
    if not isinstance(value, Tensor):
        return str(getattr(value, "code", value))
    kind = "state" if node in line.forward.state else "tensor"
    form = f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
    if node in line.forward.constants:
        form += f" constant {id(line.forward.constants[node])}"
    return f"{kind} {form} {value.requires_grad}"
