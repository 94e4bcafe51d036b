"""Which stage holds which operations, is given what, and sends what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx

from autosplit.capture.module_paths import stack
from autosplit.errors import PlanError
from autosplit.pipeline.schedule.wiring import Source

from .operation_sequence import OperationSequence
from .subgraph_module import StageGraph, make_stage_graph


class StageLayout:
    """Which stage holds which operations, is given what, and sends what.

    Args:
        line: the operations.
        places: where on the line every stage but the first begins.

    Attributes:
        nodes: of every stage, what it runs.
        sent: of every stage but the last, the operations whose values others read.
        given: of every stage, what it is given, in the order of its arguments.
    """

    def __init__(self, line: OperationSequence, places: Sequence[int]) -> None:
        self.line = line
        self.places = list(places)
        bounds = [0, *places, len(line.body)]
        self._stage = {
            node: index
            for index, (first, last) in enumerate(pairwise(bounds))
            for node in line.body[first:last]
        }
        self.nodes: list[list[fx.Node]] = []
        outside: list[list[fx.Node]] = []
        for first, last in pairwise(bounds):
            nodes, read = line.part(first, last)
            self.nodes.append(nodes)
            outside.append(read)
        self.sent = [
            [n for n in line.body[first:last] if line.last_use[n] >= last]
            for first, last in pairwise(bounds[:-1])
        ]
        self.given = [
            sorted(line.given(read), key=lambda node: _order(self.source(node))) for read in outside
        ]

    def source(self, node: fx.Node) -> Source:
        """Where what a stage is given is from."""
        position = self.line.forward.inputs.get(node)
        if position is not None:
            return Source(None, position)
        stage = self._stage[node]
        return Source(stage, self.sent[stage].index(node))

    def program(self, index: int) -> StageGraph:
        """The graph of a stage."""
        return self._program(index, self.given[index])

    def _program(self, index: int, given: Sequence[fx.Node | None]) -> StageGraph:
        last = index == len(self.places)
        return make_stage_graph(
            self.line, self.nodes[index], given, None if last else self.sent[index]
        )

    def cut_points(self) -> CutPoints:
        """Where this is cut, to cut another capture of the model alike."""
        keys = _keys(self.line)
        return CutPoints(
            tuple(keys[place] for place in self.places),
            tuple(self.line.body[place].name for place in self.places),
            self._looks(),
            tuple(tuple(map(self.source, given)) for given in self.given),
        )

    def _looks(self) -> tuple[Any, ...]:
        values = [[self.line.value(node) for node in sent] for sent in self.sent]
        return tuple(tuple((tuple(v.shape), v.dtype) for v in each) for each in values)


@dataclass(frozen=True)
class CutPoints:
    """Where a model is cut, in terms that hold in each of its captures.

    Attributes:
        keys: of the first operation of every stage but the first: its modules, its line, what it
            calls, and how often that came before.
        first: their names, for errors.
        sent: shape and dtype of what every stage but the last sends.
        given: of every stage, where its arguments are from.
    """

    keys: tuple[Any, ...]
    first: tuple[str, ...]
    sent: tuple[Any, ...]
    given: tuple[tuple[Source, ...], ...]

    def program(self, index: int, line: OperationSequence) -> StageGraph:
        """The graph of a stage in another capture of the model.

        Raises:
            PlanError: it cannot be cut there, or would take or send something else.
        """
        there = StageLayout(line, self._places(line))
        if self.sent != there._looks():
            raise PlanError("other tensors would be sent from stage to stage")
        known = {there.source(node): node for node in there.given[index]}
        if not set(known) <= set(self.given[index]):
            raise PlanError(f"stage {index} would need inputs that it is not given")
        return there._program(index, [known.get(source) for source in self.given[index]])

    def _places(self, line: OperationSequence) -> list[int]:
        """Where the same lines of the user's code run."""
        places = {key: index for index, key in enumerate(_keys(line))}
        found: list[int] = []
        for key, name in zip(self.keys, self.first, strict=True):
            place = places.get(key)
            if place is None or place in line.forbidden or place in (0, *found):
                raise PlanError(f"there can be no cut before {name}")
            found.append(place)
        return found


def _order(source: Source) -> tuple[int, int]:
    return (-1 if source.stage is None else source.stage, source.position)


def _keys(line: OperationSequence) -> list[Any]:
    """Each operation by its modules, its line, what it calls, and how often that came before."""
    seen: Counter[Any] = Counter()
    found = []
    for node in line.body:
        key = (stack(node), node.stack_trace, str(node.target))
        seen[key] += 1
        found.append((key, seen[key]))
    return found
