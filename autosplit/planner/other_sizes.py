"""Captures of a cut model for microbatches of other sizes than the example's.

In a new capture, all sizes that have varied so far are symbols. So few captures serve all lengths::

    example  (2, 16)  ──► operations for (2, 16)
    (2, 24), (2, 9)   ──► operations for (2, s)
    (3, 24)           ──► operations for (b, s)

If the model branches on a size, each branch is captured when a microbatch first takes it. All
stages must then take the same branch. A stage sees only the sizes of its own arguments. So if the
branch depends on a size that a stage does not see, the stage must compute the same in both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autosplit.capture.forward_sizes import holds_size
from autosplit.capture.module_paths import common, inside, stack
from autosplit.capture.size_rule import Leaf, SizeRule
from autosplit.errors import CaptureError, PlanError, reworded
from autosplit.pipeline.engine.boundaries import Boundary, TensorMeta
from autosplit.planner.captured_model import WholeModel
from autosplit.planner.operation_sequence import OperationSequence
from autosplit.planner.stage_layout import StageGraph, StageLayout

Sizes = Sequence[Leaf]
"""The sizes of the input tensors of a microbatch; a string for an input that was not passed."""

_ALWAYS = re.compile(r"\w+ >= [02]")  # holds for every size that is a symbol


def matching_layout(layout: StageLayout, line: OperationSequence) -> StageLayout:
    """The stages of a second capture of the model (``line``), with the cuts of ``layout``.

    Raises:
        PlanError: the model cannot be cut there, or stages would send other tensors.
    """
    keys = _keys(layout.line)
    places = {key: index for index, keys in enumerate(_keys(line)) for key in keys}
    result: list[int] = []
    for place in layout.places:
        match = next((places[key] for key in keys[place] if key in places), None)
        if match is None or match in line.forbidden or match in (0, *result):
            raise PlanError(
                f"a stage begins at {layout.line.body[place].name}, which the model computes in "
                "only one of the modes training and evaluation, or only for some sizes, or at "
                "another place: cut at a module that is always called, with cut_at="
            )
        result.append(match)
    matching = StageLayout(line, result)
    exact = line.forward.sizes is None
    if _messages(layout, exact) != _messages(matching, exact):
        raise PlanError(
            "in training and in evaluation mode, or for other sizes, the stages would send each "
            "other different tensors. Let the forward return the same results in both modes; if "
            "only one returns a cache, turn it off (transformers: config.use_cache = False)"
        )
    return matching


def _messages(layout: StageLayout, exact: bool) -> list[list[tuple[Any, ...]]]:
    """Per stage except the last, the forms of the tensors that it sends: dtype, order and number
    of dimensions, or the shape if ``exact``.
    """
    line = layout.line

    def form(node: fx.Node) -> tuple[Any, ...]:
        value = line.value(node)
        return value.dtype, line.layout(node), tuple(value.shape) if exact else value.dim()

    return [[*map(form, nodes)] for nodes in layout.sent]


def _keys(line: OperationSequence) -> list[list[Any]]:
    """Keys of each operation that are equal in every capture of a model, from the most exact.

    A key is the operation's modules, its target, and how often both occurred before. A checkpointed
    region has the keys of the operations in the region, because a model may checkpoint it in one
    mode only. The first operation of a module has the module as a key as well, because a module may
    begin with an operation that only one mode has.
    """
    seen: Counter[Any] = Counter()
    keys_of_nodes, previous = [], tuple[str, ...]()
    for node in line.body:
        modules = stack(node)
        shared = len(common(previous, modules))
        numbered = []
        for key in (
            *((stack(part), str(part.target)) for part in inside(node) or [node]),
            *(modules[:depth] for depth in range(shared + 1, len(modules) + 1)),
        ):
            seen[key] += 1
            numbered.append((key, seen[key]))
        keys_of_nodes.append(numbered)
        previous = modules
    return keys_of_nodes


class OtherSizes:
    """The graphs of all stages in one mode, for microbatches of the example's and of other sizes.

    Args:
        whole: the model.
        training: the mode, training or evaluation.
        example: the stages' operations for the sizes of the example in this mode.
        build: a function that returns the graphs of all stages in a capture of the model.
    """

    def __init__(
        self,
        whole: WholeModel,
        training: bool,
        example: StageLayout,
        build: Callable[[StageLayout], list[StageGraph]],
    ) -> None:
        self._whole, self._training, self._build = whole, training, build
        self._shapes = [tuple(tensor.shape) for tensor in whole.input_tensors]
        self._varying: list[set[int]] = [set() for _ in self._shapes]
        self._captured = [_CaptureForSizes(example, whole.input_tensors, build)]

    def graphs_of(self, stage: int, skip: int) -> list[StageGraph]:
        """A stage's graphs by capture, first for the sizes of the example, without the first
        ``skip`` ones.

        Raises:
            PlanError: the stages cannot be built for the sizes of the example.
        """
        return [captured.stage_graphs[stage] for captured in self._captured[skip:]]

    def boundaries(self, sizes: Sizes) -> list[Boundary]:
        """Per stage except the last, the tensors that it sends for a microbatch of these sizes;
        empty if the model is not captured for them.
        """
        shapes = self._completed(sizes)
        for captured in self._captured:
            if captured.is_valid_for(shapes):
                return captured.boundaries(shapes)
        return []

    def capture_missing(self, rows: Sequence[Sizes]) -> None:
        """Capture the model for microbatches for which there are no operations yet.

        Args:
            rows: the sizes of each microbatch.

        Raises:
            CaptureError: the model cannot be captured for a microbatch.
            PlanError: the model cannot be cut at the present cuts for a microbatch.
        """
        missing = [shapes for shapes in map(self._completed, rows) if not self._fits(shapes)]
        for shapes in missing:
            for varying, new, old in zip(self._varying, shapes, self._shapes, strict=True):
                varying.update(at for at, n in enumerate(new) if n != old[at])
        # Equal sizes would become one symbol.
        for shapes in sorted(missing, key=lambda row: -len({n for shape in row for n in shape})):
            if not self._fits(shapes):
                self._capture(shapes)

    def _capture(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Capture the model for inputs of these shapes.

        Raises:
            CaptureError: the model cannot be captured for them.
            PlanError: the model cannot be cut at the present cuts for them.
        """
        try:
            inputs, line = self._whole.recaptured(self._training, shapes, self._varying)
            layout = matching_layout(self._captured[0].layout, line)
            captured = _CaptureForSizes(layout, inputs, self._build)
            for earlier in self._captured:
                _check_branches(earlier, captured)
        except (CaptureError, PlanError) as error:
            text = (
                f"a microbatch has inputs of sizes {_listed(shapes)}, and the model was cut for "
                f"{_listed(self._shapes)}: {error}"
            )
            raise reworded(error, text) from error
        self._captured.append(captured)

    def _completed(self, sizes: Sizes) -> list[tuple[int, ...]]:
        """The sizes of a microbatch, with those of the example for inputs that were not passed.

        Raises:
            PlanError: an input has another number of dimensions than the example's.
        """
        shapes = list[tuple[int, ...]]()
        for position, example in enumerate(self._shapes):
            leaf = sizes[position] if position < len(sizes) else ""
            shape = example if isinstance(leaf, str) else tuple(leaf)
            if len(shape) != len(example):
                raise PlanError(
                    f"input {position} of the model has shape {list(shape)}, but the model was "
                    f"captured with {list(example)}: the number of dimensions must be the same"
                )
            shapes.append(shape)
        return shapes

    def _fits(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        return any(captured.is_valid_for(shapes) for captured in self._captured)


@dataclass(frozen=True)
class _CaptureForSizes:
    """A capture of the model for certain sizes.

    Attributes:
        layout: the operations of each stage.
        inputs: the input tensors of the capture.
        build: a function that returns the graphs of all stages.
    """

    layout: StageLayout
    inputs: Sequence[Tensor]
    build: Callable[[StageLayout], list[StageGraph]]

    @cached_property
    def stage_graphs(self) -> Sequence[StageGraph]:
        """The graph of each stage, written at the first use.

        Raises:
            PlanError: a stage would read tensors that it does not receive or hold.
        """
        return self.build(self.layout)

    @property
    def rule(self) -> SizeRule | None:
        """The sizes of the model's inputs for which the capture is valid; None: its own only."""
        sizes = self.layout.line.forward.sizes
        return None if sizes is None else sizes.rule

    def boundaries(self, shapes: Sequence[tuple[int, ...]]) -> list[Boundary]:
        """Per stage except the last, the tensors that it sends for inputs of these shapes."""
        line = self.layout.line
        values = [[*map(line.sent, nodes)] for nodes in self.layout.sent]
        outputs = [value.shape for stage_values in values for value in stage_values]
        sizes = iter(
            outputs
            if line.forward.sizes is None
            else line.forward.sizes.output_sizes(shapes, outputs)
        )
        return [
            tuple(
                TensorMeta(torch.Size(next(sizes)), value.dtype, value.requires_grad)
                for value in stage_values
            )
            for stage_values in values
        ]

    def is_valid_for(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether the capture is valid for input tensors of these shapes."""
        if self.rule is None:
            return [*shapes] == [tuple(tensor.shape) for tensor in self.inputs]
        return self.rule.output_sizes(shapes) is not None


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str([*shape]) for shape in shapes)


def _check_branches(one: _CaptureForSizes, other: _CaptureForSizes) -> None:
    """Refuse a stage that computes other operations in two captures, and does not see the sizes
    that decide between them.

    Raises:
        PlanError: names the stage.
    """
    for stage in range(len(other.stage_graphs)):
        if not (_hidden(one, stage) or _hidden(other, stage)):
            continue
        for captured, alternative in ((one, other), (other, one)):
            shapes = [shape or () for shape in captured.stage_graphs[stage].shapes]
            if alternative.stage_graphs[stage].accepts(shapes) is None:
                continue
            first, second = (
                _operations(layout, stage, captured.inputs)
                for layout in (captured.layout, alternative.layout)
            )
            if first != second:
                raise PlanError(
                    f"stage {stage} computes other operations for microbatches of other sizes, but "
                    "receives no tensor from whose sizes it could tell which: cut elsewhere "
                    "(cut_at=), or pass stages as a list"
                )


def _hidden(captured: _CaptureForSizes, stage: int) -> bool:
    """Whether a capture is valid under a condition on sizes that the stage does not see."""
    if captured.rule is None:
        return False
    seen = captured.stage_graphs[stage].conditions
    return any(c not in seen and not _ALWAYS.fullmatch(c) for c in captured.rule.conditions)


def _operations(layout: StageLayout, stage: int, inputs: Sequence[Tensor]) -> list[Any]:
    """A stage's operations with their arguments, for inputs of certain sizes."""
    forward, numbers = layout.line.forward, count()
    names: dict[fx.Node, Any] = {}

    def text_of(node: fx.Node) -> Any:
        if node in forward.size_nodes and forward.sizes is not None:
            return forward.sizes.number(forward.effects[node].value, inputs)
        if node not in names:
            names[node] = f"%{next(numbers)}"
        return names[node]

    def replaced(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return text_of(value)
        if forward.sizes is not None and holds_size(value):
            return forward.sizes.number(value, inputs)
        return value

    return [
        (text_of(node), str(node.target), str(map_aggregate((node.args, node.kwargs), replaced)))
        for node in layout.nodes[stage]
    ]
