"""The module that runs a stage of a cut model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autosplit.capture.repeated_blocks import BlockModule
from autosplit.capture.size_rule import Leaf
from autosplit.errors import PlanError
from autosplit.planner.stage_layout import BlockGraph, StageGraph
from autosplit.torch_internals.state import register_state


@dataclass
class _ModeGraphs:
    """The graphs of a stage in one mode, in the order of their captures.

    This is a linked list, because Dynamo guards everything that it reads. A trace of the stage
    reads the graphs up to the one that fits. So graphs that are added later do not invalidate it.

    Attributes:
        graph: the first graph.
        later: the others; None if there are none.
    """

    graph: StageGraph
    later: _ModeGraphs | None = None

    @classmethod
    def of(cls, graphs: Iterable[StageGraph]) -> _ModeGraphs | None:
        """A list of these graphs; None if there are none."""
        result = None
        for graph in reversed([*graphs]):
            result = cls(graph, result)
        return result

    def __iter__(self) -> Iterator[_ModeGraphs]:
        link: _ModeGraphs | None = self
        while link is not None:
            yield link
            link = link.later


GraphsOf: TypeAlias = "Callable[[bool, Sequence[Sequence[Leaf]], int], list[StageGraph]]"
"""``graphs_of(training, rows, skip)`` returns a stage's graphs in a mode, training or evaluation,
in the order of their captures and without the first ``skip`` ones: the graph for the sizes of the
example, then graphs for other sizes. Graphs that are missing for microbatches of these sizes are
captured. ``rows`` has the sizes of the model's inputs for each microbatch.
"""


class _Kinds:
    """The graphs of all kinds of blocks that a stage calls; each is an attribute.

    This is no dictionary, because Dynamo guards a dictionary's keys.
    """


class StageBlock(BlockModule):
    """A block that a stage calls. Its parameters and buffers have the names that they have in the
    block.

    Args:
        kinds: the graphs of the stage's blocks.
    """

    def __init__(self, kinds: _Kinds) -> None:
        super().__init__()
        self._kinds = kinds

    def forward(self, kind: str, *inputs: Tensor) -> Any:
        """Run the graph of a kind of block with the state of this block."""
        block: BlockGraph = getattr(self._kinds, kind)
        return block.graph(*[_find(self, name) for name in block.state], *inputs)


class StageModule(nn.Module):
    """A stage of a model. Its parameters and buffers keep their names in the model.

    A stage takes tensors and returns a tuple of tensors; the last stage returns the model's result.

    Args:
        index: the stage.
        programs: the graph of each captured mode: training (True), evaluation (False).
        model: the whole model.
        names: the names of the model's parameters and buffers in this stage.
        capture: captures graphs for other modes and sizes; None: there are none.
        blocks: the names of the model's repeated blocks, which graphs may call as modules.

    Attributes:
        tied_elsewhere: the names of the stage's parameters that other stages have, too.
        first_names: maps each name of a parameter or buffer to the first of its names in the model,
            the one that the model's own ``named_parameters`` has.
        cuts: the names of the first blocks of all stages of the model but the first.
    """

    def __init__(
        self,
        index: int,
        programs: Mapping[bool, StageGraph],
        model: nn.Module,
        names: Iterable[str],
        capture: GraphsOf | None = None,
        blocks: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.tied_elsewhere: tuple[str, ...] = ()
        self.first_names: Mapping[str, str] = {}
        self.cuts: tuple[str, ...] = ()
        self._index = index
        # Not a dictionary: a trace in one mode guards all keys.
        self._training_graphs, self._evaluation_graphs = (
            _ModeGraphs(programs[mode]) if mode in programs else None for mode in (True, False)
        )
        self._capture = capture
        self._kinds = _Kinds()
        self._add_kinds(programs.values())
        register_state(
            self, model, names, lambda n: StageBlock(self._kinds) if n in blocks else nn.Module()
        )

    def forward(self, *inputs: Tensor) -> Any:
        """Run the stage.

        Raises:
            PlanError: there is no graph for inputs of these shapes (see ``take_sizes``), or the
                model cannot be cut in this mode.
        """
        program = self.check_inputs(inputs)
        names = (*program.state, *program.blocks)
        results = program.graph(*[_find(self, name) for name in names], *inputs)
        if program.aux_losses:
            results = self._leave_losses(program.aux_losses, results)
        return results if program.structure is None else program.structure(results)

    def _leave_losses(self, names: Sequence[str], results: Sequence[Any]) -> Sequence[Any]:
        """Set the sums of auxiliary losses as attributes; return the other results."""
        count = len(results) - len(names)
        for name in dict.fromkeys(names):
            pairs = zip(names, results[count:], strict=True)
            losses = [loss for attribute, loss in pairs if attribute == name]
            setattr(self, name, torch.stack(losses).sum())
        return results[:count]

    def _add_kinds(self, graphs: Iterable[StageGraph]) -> None:
        """Let blocks find the graphs that stage graphs call. Graphs of a name are equal; traces
        guard the first one.
        """
        for graph in graphs:
            vars(self._kinds).update({**graph.kinds, **vars(self._kinds)})

    def train(self, mode: bool = True) -> StageModule:
        """Set the mode, and capture the stage in it if needed. A capture at the first call could
        run inside a trace by the caller. The first call raises an error of the capture.
        """
        super().train(mode)
        with contextlib.suppress(PlanError):
            self._graphs_in(self.training)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> StageModule:
        """Move parameters and buffers, as ``to`` does, and the graphs with them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for graphs in filter(None, (self._training_graphs, self._evaluation_graphs)):
            device = fn(torch.empty(0, device=graphs.graph.device)).device
            for link in graphs:
                link.graph = link.graph.moved(device)
                vars(self._kinds).update(link.graph.kinds)
        return self

    def take_sizes(self, rows: Sequence[Sequence[Leaf]], *, training: bool) -> None:
        """Capture the stage for microbatches for which it has no graph yet.

        Args:
            rows: the sizes of the whole model's inputs, for each microbatch.
            training: the mode, training or evaluation, in which the microbatches will run.

        Raises:
            CaptureError: the model cannot be captured for a microbatch.
            PlanError: the model cannot be cut at the present cuts in this mode, or for a
                microbatch.
        """
        links = [*self._graphs_in(training)]
        if self._capture is not None:
            device = links[0].graph.device
            new = [g.moved(device) for g in self._capture(training, rows, len(links))]
            self._add_kinds(new)
            links[-1].later = _ModeGraphs.of(new)

    def check_inputs(self, inputs: Sequence[Tensor]) -> StageGraph:
        """Check the inputs' number and shapes, and return the graph for them in the present mode.

        Raises:
            PlanError: another number of inputs, no graph for their shapes, or the model cannot be
                cut in this mode.
        """
        first = self._graphs_in(self.training)
        example = first.graph.shapes
        if len(inputs) != len(example):
            raise PlanError(
                f"stage {self._index} takes {len(example)} tensors, got {len(inputs)}: pass the "
                "outputs of earlier stages that it reads"
            )
        shapes = [tuple(tensor.shape) for tensor in inputs]
        graphs: _ModeGraphs | None = first
        while graphs is not None:
            if graphs.graph.accepts(shapes) is not None:
                return graphs.graph
            graphs = graphs.later
        pairs = enumerate(zip(shapes, example, strict=True))
        position = next(at for at, (shape, expected) in pairs if expected not in (None, shape))
        raise PlanError(
            f"stage {self._index}: input {position} has shape {list(shapes[position])}, but the "
            f"model was captured with {list(example[position] or ())}; run the stages in a "
            "PipelineTrainer, which captures them for other sizes, or cut the model again"
        )

    def _graphs_in(self, training: bool) -> _ModeGraphs:
        """The graphs of a mode. The stage is captured in it unless it is captured already.

        Raises:
            PlanError: the model cannot be cut in this mode.
        """
        graphs = self._training_graphs if training else self._evaluation_graphs
        if graphs is not None:
            return graphs
        other = self._evaluation_graphs if training else self._training_graphs
        if other is None or self._capture is None:
            mode = "training" if training else "evaluation"
            raise PlanError(f"stage {self._index} has no graph for {mode}")
        device = other.graph.device  # moved with the stage
        first, *later = (graph.moved(device) for graph in self._capture(training, (), 0))
        self._add_kinds((first, *later))
        graphs = _ModeGraphs(first, _ModeGraphs.of(later))
        if training:
            self._training_graphs = graphs
        else:
            self._evaluation_graphs = graphs
        return graphs


def _find(module: nn.Module, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value
