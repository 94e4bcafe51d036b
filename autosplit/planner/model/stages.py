"""A whole model, cut: who feeds whom, and the modules of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import fx, nn

from autosplit.capture.module_paths import stack
from autosplit.checkpoint.naming import Mismatch
from autosplit.errors import AutosplitError, PlanError
from autosplit.pipeline.schedule.wiring import Source, Wiring
from autosplit.planner.meta_init.checkpoint_values import CheckpointValues
from autosplit.planner.meta_init.initialise import Init, Initialiser
from autosplit.planner.meta_init.materialise import Values, materialise_stage
from autosplit.torch_internals.module_state import hold_state

from .captured_model import WholeModel
from .operation_sequence import OperationSequence
from .stage_state import StageState
from .subgraph_module import StageGraph, StageModule, make_stage_graph


def cut(whole: WholeModel, cuts: Sequence[int]) -> Partition:
    """Cut a model into stages.

    Args:
        whole: the model.
        cuts: for every stage but the first, its first block.

    Raises:
        PlanError: the cuts do not increase, or there is no such block.
    """
    cuts = tuple(cuts)
    count = len(whole.blocks)
    if list(cuts) != sorted({*cuts}) or any(not 0 < k < count for k in cuts):
        raise PlanError(
            f"cuts are the first blocks of all stages but the first, increasing, of 1 to "
            f"{count - 1}; got {list(cuts)}"
        )
    return Partition(whole, cuts)


class Partition:
    """A model in stages.

    Attributes:
        whole: the model.
        cuts: the first block of every stage but the first.
        wiring: who feeds whom.
        shared: for each parameter in several stages, where it is: (stage, name).
    """

    def __init__(self, whole: WholeModel, cuts: tuple[int, ...]) -> None:
        self.whole = whole
        self.cuts = cuts
        self._layout = _StageLayout(whole.line, [whole.blocks[k].first for k in cuts])
        sources = [[_source(self._layout, n) for n in given] for given in self._layout.given]
        self.wiring = Wiring(
            tuple(map(tuple, sources)),
            tuple(len(sent) for sent in self._layout.sent),
            whole.names,
        )
        self._state = StageState(whole, self._layout.nodes)
        self._values: Values | None = None
        self.shared = self._state.shared()

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.cuts) + 1

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the first block of every stage but the first."""
        return tuple(self.whole.blocks[k].name for k in self.cuts)

    def initialise(self, init: Init | None = None, *, seed: int = 0) -> None:
        """Have stages that are built from now on start with initial values.

        Only what the model has on the meta device gets any, and only on the rank that builds the
        stage. They depend on the seed alone, not on the cuts.

        Args:
            init: see ``Initialiser``.
            seed: of all random numbers.
        """
        self._values = Initialiser(self.whole.model, init, seed=seed)

    def load_checkpoint(
        self, path: str | Path, *, strict: bool = True, init: Init | None = None, seed: int = 0
    ) -> tuple[Mismatch, ...]:
        """Have stages that are built from now on start with a checkpoint's values.

        Args:
            path: a checkpoint of the whole model, see ``open_checkpoint``.
            strict: refuse one in which tensors are missing or too much.
            init: for what is missing, see ``Initialiser``.
            seed: likewise.

        Returns:
            What is missing or too much.

        Raises:
            CheckpointError: it cannot be read, or tensors are missing, too much or misshapen.
        """
        values = CheckpointValues(self.whole.model, path, strict=strict, init=init, seed=seed)
        self._values = values
        return values.mismatches

    def build(self, index: int) -> nn.Module:
        """The module of a stage, with the model's own parameters and buffers. What the model has on
        the meta device is here on the CPU, with the values that ``initialise`` or
        ``load_checkpoint`` chose.

        It runs the forward as it is in training and as it is in evaluation, and is in the mode that
        the model is in now; the mode in which the model was not captured is captured now, the first
        time that a stage is built.

        Raises:
            PlanError: there is no such stage, or something on the meta device has no values.
        """
        self._check(index)
        module = self._module(index, self._other(index))
        module.training = self.whole.model.training  # what is inside has that of the model already
        return materialise_stage(module, self._values)

    def sketch(self, index: int) -> nn.Module:
        """The module of a stage in the mode of the capture only, with the model's own parameters
        and buffers; those on the meta device stay there.

        Raises:
            PlanError: there is no such stage.
        """
        self._check(index)
        return self._module(index, PlanError("a sketch runs only in the mode of the capture"))

    def _check(self, index: int) -> None:
        if not 0 <= index < self.stages:
            raise PlanError(f"there are stages 0 to {self.stages - 1}, got {index}")

    def _module(self, index: int, other: StageGraph | PlanError) -> StageModule:
        training = self.whole.training
        own = self._program(index)
        module = StageModule(index, *((own, other) if training else (other, own)))
        module.train(training)
        hold_state(module, self.whole.model, self._state.names[index])
        return module

    def _program(self, index: int) -> StageGraph:
        program = self._layout.program(index, self._layout.given[index])
        return self._state.renamed(index, program)

    def _other(self, index: int) -> StageGraph | PlanError:
        mode = "evaluation" if self.whole.training else "training"
        try:
            twin = self.whole.twin
        except AutosplitError as error:
            return PlanError(f"the model cannot be captured for {mode}: {error}")
        try:
            return self._state.renamed(index, self._layout.again(index, twin.line))
        except PlanError as error:
            return PlanError(f"the model cannot be cut for {mode} where it is cut: {error}")


class _StageLayout:
    """Which stage holds which operations, is given what, and sends what."""

    def __init__(self, line: OperationSequence, places: Sequence[int]) -> None:
        self.line = line
        self.places = list(places)
        bounds = [0, *places, len(line.body)]
        self.stage = {
            node: index
            for index, (first, last) in enumerate(pairwise(bounds))
            for node in line.body[first:last]
        }
        self.nodes: list[list[fx.Node]] = []
        self.outside: list[list[fx.Node]] = []
        for first, last in pairwise(bounds):
            nodes, outside = line.part(first, last)
            self.nodes.append(nodes)
            self.outside.append(outside)
        self.sent = [
            [n for n in line.body[first:last] if line.last_use[n] >= last]
            for first, last in pairwise(bounds[:-1])
        ]
        self.given = [
            sorted(line.given(outside), key=lambda node: _order(_source(self, node)))
            for outside in self.outside
        ]

    def program(self, index: int, given: Sequence[fx.Node | None]) -> StageGraph:
        last = index == len(self.places)
        return make_stage_graph(
            self.line, self.nodes[index], given, None if last else self.sent[index]
        )

    def again(self, index: int, line: OperationSequence) -> StageGraph:
        """The same stage in another capture of the model.

        Raises:
            PlanError: it would take or put out something else.
        """
        there = _StageLayout(
            line, _find(line, [self.line.body[place] for place in self.places], self.line)
        )
        if [_looks(self, s) for s in self.sent] != [_looks(there, s) for s in there.sent]:
            raise PlanError("other tensors would be sent from stage to stage")
        known = {_source(there, node): node for node in there.given[index]}
        wanted = [_source(self, node) for node in self.given[index]]
        if not set(known) <= set(wanted):
            raise PlanError(f"stage {index} would need inputs that it is not given")
        return there.program(index, [known.get(source) for source in wanted])


def _source(layout: _StageLayout, node: fx.Node) -> Source:
    position = layout.line.forward.inputs.get(node)
    if position is not None:
        return Source(None, position)
    stage = layout.stage[node]
    return Source(stage, layout.sent[stage].index(node))


def _order(source: Source) -> tuple[int, int]:
    return (-1 if source.stage is None else source.stage, source.position)


def _looks(layout: _StageLayout, nodes: Sequence[fx.Node]) -> list[Any]:
    values = [layout.line.value(node) for node in nodes]
    return [(tuple(value.shape), value.dtype) for value in values]


def _find(line: OperationSequence, nodes: Sequence[fx.Node], known: OperationSequence) -> list[int]:
    """Where the same lines of the user's code run in another capture."""
    places = {key: index for index, key in enumerate(_keys(line))}
    keys = _keys(known)
    found: list[int] = []
    for node in nodes:
        place = places.get(keys[known.position[node]])
        if place is None or place in line.forbidden or place in (0, *found):
            raise PlanError(f"there can be no cut before {node.name}")
        found.append(place)
    return found


def _keys(line: OperationSequence) -> list[Any]:
    """Each operation by its modules, its line, what it calls, and how often that came before."""
    seen: Counter[Any] = Counter()
    found = []
    for node in line.body:
        key = (stack(node), node.stack_trace, str(node.target))
        seen[key] += 1
        found.append((key, seen[key]))
    return found
